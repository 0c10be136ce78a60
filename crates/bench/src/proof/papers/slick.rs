//! Slick: services in the kernel.

use super::exhibit::Answer::{Measured, NotMeasured};
use super::exhibit::Kind::Gain;
use super::exhibit::Lines::{All, Span};
use super::exhibit::Theirs::{Each, Words};
use super::exhibit::{Claim, Exhibit, Form, Paper};
use crate::comparison::Quantity;

pub(super) const PAPER: Paper = Paper {
    name: "Slick",
    title: "Slick: A Framework for High Throughput Network Applications in the Kernel (thesis, 2011)",
    exhibits: &[
        Exhibit {
            name: "Table 3.1",
            shows: "the machines",
            answer: NotMeasured("there are no measurements in it; ours are described below"),
        },
        Exhibit {
            name: "Figure 3.1, Table 3.2",
            shows: "an echo in the kernel and in user space, by size",
            answer: Measured(&[
                Claim {
                    what: "throughput, kernel to a plain program",
                    theirs: Each(&ECHO),
                    place: "Table 3.2",
                    kind: Gain,
                    command: SERVE,
                    table: "echo",
                    lines: All,
                    quantity: Quantity::RATE,
                    form: KERNEL,
                },
                Claim {
                    what: "latency, kernel to a plain program",
                    theirs: Each(&ECHO_LATENCY),
                    place: "Table 3.2",
                    kind: Gain,
                    command: SERVE,
                    table: "echo",
                    lines: All,
                    quantity: Quantity::MEDIAN,
                    form: Form::PartOf("kernel", "plain"),
                },
            ]),
        },
        Exhibit {
            name: "Section 3.2.4",
            shows: "that the kernel wins where messages are small: with 16 under way for each client instead of one",
            answer: Measured(&[
                Claim {
                    what: "up to 512 B, kernel to a plain program",
                    theirs: Words("ahead, how many are under way is not said"),
                    place: "3.2.4",
                    kind: Gain,
                    command: ECHO_MANY,
                    table: "echo-many",
                    lines: Span(0.0, 512.0),
                    quantity: Quantity::RATE,
                    form: KERNEL,
                },
                Claim {
                    what: "the same, with --engine auto, which moves conversations",
                    theirs: Words("not in the thesis"),
                    place: "",
                    kind: Gain,
                    command: ECHO_MANY,
                    table: "echo-many",
                    lines: Span(0.0, 512.0),
                    quantity: Quantity::RATE,
                    form: Form::TimesAsFast("auto", "plain"),
                },
            ]),
        },
        Exhibit {
            name: "Figure 3.2, Table 3.3",
            shows: "a forwarder of Thrift messages in the kernel and with libevent, by payload",
            answer: Measured(&[Claim {
                what: "throughput, kernel to libevent (theirs of both runs together)",
                theirs: Each(&FORWARD),
                place: "Table 3.3",
                kind: Gain,
                command: FORWARDER,
                table: "forward",
                lines: All,
                quantity: Quantity::RATE,
                form: KERNEL,
            }]),
        },
    ],
};

const SERVE: &str = "serve echo";
const ECHO_MANY: &str = "serve echo-many --sizes 32,64,128,256,512";
const FORWARDER: &str = "serve forward";

const KERNEL: Form = Form::TimesAsFast("kernel", "plain");

/// The ratio of the kernel's to the user process's rate (Mbit/s), by size.
const ECHO: [(f64, f64); 10] = [
    (32.0, 103.66 / 65.57),
    (64.0, 166.24 / 120.37),
    (128.0, 239.50 / 183.59),
    (256.0, 319.28 / 258.51),
    (512.0, 431.90 / 334.72),
    (1024.0, 751.85 / 536.86),
    (2048.0, 757.17 / 759.93),
    (4096.0, 734.33 / 784.33),
    (8192.0, 741.97 / 747.26),
    (16384.0, 772.09 / 746.63),
];
/// The ratio of the latencies (ms), by size.
const ECHO_LATENCY: [(f64, f64); 10] = [
    (32.0, 31.0 / 37.0),
    (64.0, 28.0 / 32.0),
    (128.0, 27.0 / 28.0),
    (256.0, 37.0 / 31.0),
    (512.0, 37.0 / 36.0),
    (1024.0, 15.0 / 33.0),
    (2048.0, 15.0 / 13.0),
    (4096.0, 21.0 / 17.0),
    (8192.0, 17.0 / 16.0),
    (16384.0, 12.0 / 17.0),
];
/// The ratio of the kernel's to the user process's rate, each the sum of two runs, by payload.
const FORWARD: [(f64, f64); 8] = [
    (32.0, (15.40 + 15.20) / (6.79 + 6.22)),
    (64.0, (22.88 + 22.80) / (7.21 + 7.21)),
    (128.0, (37.00 + 37.00) / (11.47 + 9.04)),
    (256.0, (63.54 + 63.20) / (36.91 + 36.31)),
    (512.0, (132.60 + 168.60) / (71.45 + 70.32)),
    (1024.0, (201.20 + 199.60) / (153.17 + 197.94)),
    (2048.0, (275.73 + 414.00) / (341.63 + 296.78)),
    (4096.0, (423.23 + 418.15) / (441.10 + 367.87)),
];
