//! Slim: a container overlay network that does its work when a connection is set up.

use super::exhibit::Answer::{Measured, NotMeasured};
use super::exhibit::Kind::{Cost, Fact, Gain};
use super::exhibit::Lines::{All, Only};
use super::exhibit::Theirs::{About, AtLeast, Between, Words};
use super::exhibit::{Claim, Exhibit, Form, Paper};
use crate::comparison::Quantity;

pub(super) const PAPER: Paper = Paper {
    name: "Slim",
    title: "Slim: OS Kernel Support for a Low-Overhead Container Overlay Network (NSDI 2019)",
    exhibits: &[
        Exhibit {
            name: "Figure 1",
            shows: "a packet's way through overlays of containers and of virtual machines",
            answer: NotMeasured("a drawing"),
        },
        Exhibit {
            name: "Table 1",
            shows: "ways to connect containers, and whose addresses they use",
            answer: NotMeasured("there are no figures in it"),
        },
        Exhibit {
            name: "Figure 2",
            shows: "the architecture of an overlay",
            answer: NotMeasured("a drawing"),
        },
        Exhibit {
            name: "Table 2",
            shows: "a connection on the overlay and on the hosts' network (ours: VXLAN, between two hosts)",
            answer: Measured(&[
                Claim {
                    what: "throughput, overlay to host",
                    theirs: About(14.0 / 26.8),
                    place: "Table 2",
                    kind: Fact,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::MEGABYTES,
                    form: VXLAN_OF_HOST,
                },
                Claim {
                    what: "round trip, overlay to host (theirs of 32 B)",
                    theirs: About(20.9 / 11.3),
                    place: "Table 2",
                    kind: Fact,
                    command: OVERLAY,
                    table: "round-trip",
                    lines: All,
                    quantity: Quantity::MEDIAN,
                    form: VXLAN_OF_HOST,
                },
            ]),
        },
        Exhibit {
            name: "Figure 3",
            shows: "processor time of a connection on the overlay and on the hosts' network",
            answer: Measured(&[
                Claim {
                    what: "in all, overlay to host",
                    theirs: About(1.66),
                    place: "2.2.2",
                    kind: Fact,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::CPU_OF_GB,
                    form: VXLAN_OF_HOST,
                },
                Claim {
                    what: "software interrupts, overlay to host",
                    theirs: About(0.50 / 0.23),
                    place: "2.2.2",
                    kind: Fact,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::SOFTIRQ,
                    form: VXLAN_OF_HOST,
                },
            ]),
        },
        Exhibit {
            name: "Table 3",
            shows: "packet steering on an overlay",
            answer: NotMeasured(
                "it spreads the packets of a fast network card over many processors; our hosts are namespaces with one \
                 processor each",
            ),
        },
        Exhibit { name: "Figure 4", shows: "the architecture of Slim", answer: NotMeasured("a drawing") },
        Exhibit {
            name: "Figure 5",
            shows: "how a connection is set up",
            answer: NotMeasured("a drawing; how long it takes is at section 6.1"),
        },
        Exhibit {
            name: "Section 6.1",
            shows: "one connection: throughput, latency, set-up",
            answer: Measured(&[
                Claim {
                    what: "throughput, to the host's network",
                    theirs: About(1.0),
                    place: "6.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::MEGABYTES,
                    form: Form::TimesAsFast(SECURE, HOST),
                },
                Claim {
                    what: "throughput, to the overlay (theirs with receive flow steering)",
                    theirs: About(1.09),
                    place: "6.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::MEGABYTES,
                    form: Form::TimesAsFast(SECURE, VXLAN),
                },
                Claim {
                    what: "round trip, to the overlay (theirs with receive flow steering)",
                    theirs: About(1.86),
                    place: "6.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "round-trip",
                    lines: All,
                    quantity: Quantity::MEDIAN,
                    form: Form::TimesAsFast(SECURE, VXLAN),
                },
                Claim {
                    what: "set-up, to that on the overlay (ours to the first byte answered)",
                    theirs: About(444.0 / 270.0),
                    place: "6.1",
                    kind: Cost,
                    command: OVERLAY,
                    table: "set-up",
                    lines: Only(&["connection set-up, to the first byte answered"]),
                    quantity: Quantity::MEDIAN,
                    form: Form::PartOf(TRUSTING, VXLAN),
                },
                Claim {
                    what: "set-up in secure mode, to that without",
                    theirs: About(556.0 / 444.0),
                    place: "6.1",
                    kind: Cost,
                    command: OVERLAY,
                    table: "set-up",
                    lines: Only(&["connection set-up, to the first byte answered"]),
                    quantity: Quantity::MEDIAN,
                    form: Form::PartOf(SECURE, TRUSTING),
                },
            ]),
        },
        Exhibit {
            name: "Figure 6",
            shows: "processor time of a connection by throughput",
            answer: Measured(&[
                Claim {
                    what: "to the overlay (theirs with receive flow steering)",
                    theirs: Between(0.59, 0.78),
                    place: "6.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::CPU_OF_GB,
                    form: SECURE_OF_VXLAN,
                },
                Claim {
                    what: "software interrupts, the same",
                    theirs: About(0.51),
                    place: "6.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::SOFTIRQ,
                    form: SECURE_OF_VXLAN,
                },
                Claim {
                    what: "to the host's network",
                    theirs: About(1.0),
                    place: "6.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "throughput",
                    lines: All,
                    quantity: Quantity::CPU_OF_GB,
                    form: Form::PartOf(SECURE, HOST),
                },
            ]),
        },
        Exhibit {
            name: "Figure 7",
            shows: "two containers' throughput while limits and access of one change",
            answer: Measured(&[
                Claim {
                    what: "what the limited connection gets, to its limit (theirs of 15, 10 and 5 Gbit/s)",
                    theirs: Between(14.0 / 15.0, 1.0),
                    place: "6.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "policy",
                    lines: All,
                    quantity: Quantity::PART,
                    form: Form::Of("policy changes"),
                },
                Claim {
                    what: "what the other connection gets meanwhile",
                    theirs: Words("more, the less the first may have"),
                    place: "6.1",
                    kind: Fact,
                    command: OVERLAY,
                    table: "policy",
                    lines: All,
                    quantity: Quantity::MEGABYTES,
                    form: Form::Of("other container"),
                },
            ]),
        },
        Exhibit {
            name: "Figure 8",
            shows: "memcached: throughput and latency",
            answer: Measured(&[
                Claim {
                    what: "operations a second, to the overlay (theirs with and without receive flow steering)",
                    theirs: Between(1.66, 1.79),
                    place: "6.2.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "memcached",
                    lines: All,
                    quantity: Quantity::RATE,
                    form: Form::TimesAsFast(SECURE, VXLAN),
                },
                Claim {
                    what: "operations a second, to the host's network",
                    theirs: AtLeast(0.98),
                    place: "6.2.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "memcached",
                    lines: All,
                    quantity: Quantity::RATE,
                    form: Form::TimesAsFast(SECURE, HOST),
                },
                Claim {
                    what: "latency, to the overlay (theirs the mean, ours the median)",
                    theirs: About(0.58),
                    place: "6.2.1",
                    kind: Gain,
                    command: OVERLAY,
                    table: "memcached",
                    lines: All,
                    quantity: Quantity::MEDIAN,
                    form: SECURE_OF_VXLAN,
                },
            ]),
        },
        Exhibit {
            name: "Figure 9",
            shows: "memcached: how latencies are distributed",
            answer: Measured(&[Claim {
                what: "the tail, to the overlay's (theirs 99.9 %, ours 99 %)",
                theirs: About(0.59),
                place: "6.2.1",
                kind: Gain,
                command: OVERLAY,
                table: "memcached",
                lines: All,
                quantity: Quantity::P99,
                form: SECURE_OF_VXLAN,
            }]),
        },
        Exhibit {
            name: "Figure 10",
            shows: "memcached: processor time",
            answer: Measured(&[Claim {
                what: "of an operation, to the overlay (theirs of client and server by themselves)",
                theirs: Between(0.46, 0.62),
                place: "6.2.1",
                kind: Gain,
                command: OVERLAY,
                table: "memcached",
                lines: All,
                quantity: Quantity::CPU_OF_ONE,
                form: SECURE_OF_VXLAN,
            }]),
        },
        Exhibit {
            name: "Figure 11",
            shows: "nginx: processor time (theirs of the server, ours of both hosts)",
            answer: Measured(&[
                Claim {
                    what: "files of 1 KB, to the overlay",
                    theirs: About(0.72),
                    place: "6.2.2",
                    kind: Gain,
                    command: OVERLAY,
                    table: "nginx",
                    lines: Only(&["nginx, 1 KB, 50 connections"]),
                    quantity: Quantity::CPU_OF_ONE,
                    form: SECURE_OF_VXLAN,
                },
                Claim {
                    what: "files of 1 MB, to the overlay",
                    theirs: About(0.60),
                    place: "6.2.2",
                    kind: Gain,
                    command: OVERLAY,
                    table: "nginx",
                    lines: Only(&["nginx, 1024 KB, 10 connections"]),
                    quantity: Quantity::CPU_OF_ONE,
                    form: SECURE_OF_VXLAN,
                },
            ]),
        },
        Exhibit {
            name: "Figure 12",
            shows: "PostgreSQL and Kafka: processor time",
            answer: NotMeasured("shunt bench overlay runs neither of them"),
        },
        Exhibit {
            name: "Table 4",
            shows: "how long the migration of a container takes",
            answer: NotMeasured(
                "most of it is the file system of a container, which shunt has nothing to do with; that a container's \
                 address moves is tested, and not timed",
            ),
        },
    ],
};

const OVERLAY: &str = "overlay";

const HOST: &str = "host";
const VXLAN: &str = "VXLAN";
const TRUSTING: &str = "shunt";
/// As the paper's, which evaluates its secure mode.
const SECURE: &str = "shunt secure";

const VXLAN_OF_HOST: Form = Form::PartOf(VXLAN, HOST);
const SECURE_OF_VXLAN: Form = Form::PartOf(SECURE, VXLAN);
