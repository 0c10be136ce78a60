//! KTCP: TCP split in two relays' kernels.

use super::exhibit::Answer::{Measured, NotMeasured};
use super::exhibit::Kind::{Cost, Fact, Gain};
use super::exhibit::Lines::{All, Only};
use super::exhibit::Theirs::{About, AtLeast, UpTo, Words};
use super::exhibit::{Claim, Exhibit, Form, Paper};
use crate::comparison::Quantity;

pub(super) const PAPER: Paper = Paper {
    name: "KTCP",
    title: "Kernels of Splitting TCP in the Clouds (VMware)",
    exhibits: &[
        Exhibit {
            name: "Figure 1",
            shows: "time lines: ideal, end to end, split",
            answer: NotMeasured("drawings without figures; what they come to is Figure 3"),
        },
        Exhibit {
            name: "Figure 2",
            shows: "time lines: what each improvement takes away",
            answer: NotMeasured("drawings without figures; what they come to is Figure 3"),
        },
        Exhibit {
            name: "Section 3, memory",
            shows: "memory of a split connection",
            answer: Measured(&[Claim {
                what: "of an idle one, in one relay",
                theirs: About(50.0),
                place: "3, Memory Footprint",
                kind: Cost,
                command: IDLE,
                table: "idle",
                lines: All,
                quantity: Quantity::MEMORY,
                form: Form::Beyond(ALL, "routed, not split"),
            }]),
        },
        Exhibit {
            name: "Section 3, switches",
            shows: "a switch between two kernel threads, threads or processes",
            answer: NotMeasured("it compares threads of a kernel module, of which shunt has none"),
        },
        Exhibit {
            name: "Section 3, threads",
            shows: "the start of a thread and of a process for a connection, of which shunt relay starts none",
            answer: Measured(&[
                Claim {
                    what: "a thread (ours with its end)",
                    theirs: About(13.0),
                    place: "3, footnote 4",
                    kind: Fact,
                    command: COST,
                    table: "Nothing to gain",
                    lines: Only(&["start and end of a thread"]),
                    quantity: Quantity::MEDIAN,
                    form: Form::Of("TCP nodelay"),
                },
                Claim {
                    what: "a fork (ours with its end)",
                    theirs: AtLeast(25.0),
                    place: "3, footnote 4",
                    kind: Fact,
                    command: COST,
                    table: "Nothing to gain",
                    lines: Only(&["fork"]),
                    quantity: Quantity::MEDIAN,
                    form: Form::Of("TCP nodelay"),
                },
            ]),
        },
        Exhibit {
            name: "Section 3, buffers",
            shows: "throughput by size of the buffer through which the relay forwards",
            answer: NotMeasured(
                "shunt relay splices: there is no such buffer, unless it is told to copy or to encrypt",
            ),
        },
        Exhibit {
            name: "Figure 3",
            shows: "time to the first byte, by size",
            answer: Measured(&[
                Claim {
                    what: "a plain relay, to ssh forwarding",
                    theirs: About(1.0),
                    place: "4",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: All,
                    quantity: Quantity::FIRST_BYTE,
                    form: Form::PartOf(PLAIN, "ssh forwarding"),
                },
                Claim {
                    what: "what early SYN saves (theirs with a thread pool, which ours does not need)",
                    theirs: About(60.0),
                    place: "4",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: All,
                    quantity: Quantity::FIRST_BYTE,
                    form: Form::Saves(EARLY, PLAIN),
                },
                Claim {
                    what: "what warm connections save",
                    theirs: About(180.0),
                    place: "4",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: All,
                    quantity: Quantity::FIRST_BYTE,
                    form: Form::Saves(WARM, EARLY),
                },
                Claim {
                    what: "what turbo start saves",
                    theirs: Words("nothing"),
                    place: "4",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: All,
                    quantity: Quantity::FIRST_BYTE,
                    form: Form::Saves(ALL, WARM),
                },
            ]),
        },
        Exhibit {
            name: "Figure 4",
            shows: "time of a download, by size",
            answer: Measured(&[
                Claim {
                    what: "all of the relay, to end to end",
                    theirs: UpTo(3.0),
                    place: "4",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: All,
                    quantity: Quantity::LAST_BYTE,
                    form: Form::TimesAsFast(ALL, "direct, end to end"),
                },
                Claim {
                    what: "what turbo start saves of 10 KB",
                    theirs: Words("nothing"),
                    place: "4",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: Only(&["10 KB"]),
                    quantity: Quantity::LAST_BYTE,
                    form: Form::Saves(ALL, WARM),
                },
                Claim {
                    what: "what turbo start saves of larger files",
                    theirs: Words("much"),
                    place: "4",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: Only(&["50 KB", "100 KB", "1 MB", "10 MB", "50 MB"]),
                    quantity: Quantity::LAST_BYTE,
                    form: Form::Saves(ALL, WARM),
                },
            ]),
        },
    ],
};

const RELAY: &str =
    "relay downloads --ways direct,routed,ssh,haproxy-window,relay,relay-early,relay-pool,relay-turbo";
const COST: &str = "local cost --seconds 0.3";
const IDLE: &str = "relay idle --ways routed,relay-turbo";

const PLAIN: &str = "shunt relay, plain";
const EARLY: &str = "+ early SYN";
const WARM: &str = "+ warm connections";
const ALL: &str = "+ turbo start";
