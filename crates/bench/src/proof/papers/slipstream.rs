//! Slipstream: a shim and a daemon that move local TCP to Unix sockets.

use super::exhibit::Answer::{Measured, NotMeasured};
use super::exhibit::Kind::{Cost, Gain};
use super::exhibit::Lines::{All, Only, Span};
use super::exhibit::Theirs::{About, AtLeast, Between, Words};
use super::exhibit::{Claim, Exhibit, Form, Paper};
use crate::comparison::Quantity;

pub(super) const PAPER: Paper = Paper {
    name: "Slipstream",
    title: "Slipstream: Automatic Interprocess Communication Optimization (USENIX ATC 2015)",
    exhibits: &[
        Exhibit {
            name: "Figure 1",
            shows: "where shim and daemon are in the stack",
            answer: NotMeasured("a drawing"),
        },
        Exhibit {
            name: "Figure 2",
            shows: "two networks with the same addresses on one host",
            answer: NotMeasured("a drawing"),
        },
        Exhibit {
            name: "Figure 3",
            shows: "what system calls cost more, and a connection's latency",
            answer: Measured(&[
                Claim {
                    what: "open and close of a file",
                    theirs: About(1.0 / 1.05),
                    place: "5.1.1",
                    kind: Cost,
                    command: COST,
                    table: "Nothing to gain",
                    lines: Only(&["open and close of a file"]),
                    quantity: Quantity::RATE,
                    form: TO_PLAIN,
                },
                Claim {
                    what: "select on 100 connections",
                    theirs: About(1.0 / 1.15),
                    place: "5.1.1",
                    kind: Cost,
                    command: COST,
                    table: "Nothing to gain",
                    lines: Only(&["select on 100 connections"]),
                    quantity: Quantity::RATE,
                    form: TO_PLAIN,
                },
                Claim {
                    what: "fork and exec",
                    theirs: Words("slower, the most of all"),
                    place: "5.1.1",
                    kind: Cost,
                    command: COST,
                    table: "Nothing to gain",
                    lines: Only(&["fork", "spawn of a program"]),
                    quantity: Quantity::RATE,
                    form: TO_PLAIN,
                },
                Claim {
                    what: "connect",
                    theirs: Words("much slower"),
                    place: "5.1.1",
                    kind: Cost,
                    command: COST,
                    table: "Nothing to gain",
                    lines: Only(&["connect and close"]),
                    quantity: Quantity::RATE,
                    form: TO_PLAIN,
                },
                Claim {
                    what: "round trip of a byte",
                    theirs: About(2.0),
                    place: "5.1.1",
                    kind: Gain,
                    command: ROUND_TRIP,
                    table: TWO_CORES,
                    lines: Only(&["1 B"]),
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
            ]),
        },
        Exhibit {
            name: "Figure 4",
            shows: "Netperf: messages in one direction, by size",
            answer: Measured(&[
                Claim {
                    what: "32 to 256 B, to TCP with Nagle's algorithm, which gathers them",
                    theirs: Between(0.5, 0.75),
                    place: "5.1.2",
                    kind: Cost,
                    command: STREAM,
                    table: "Messages in one direction",
                    lines: Span(32.0, 256.0),
                    quantity: Quantity::MEGABYTES,
                    form: TO_TCP,
                },
                Claim {
                    what: "larger messages, the same",
                    theirs: Words("faster"),
                    place: "5.1.2",
                    kind: Gain,
                    command: STREAM,
                    table: "Messages in one direction",
                    lines: Span(1024.0, f64::INFINITY),
                    quantity: Quantity::MEGABYTES,
                    form: TO_TCP,
                },
                Claim {
                    what: "only the client under shunt",
                    theirs: About(1.0 - 0.035),
                    place: "5.1.2",
                    kind: Cost,
                    command: ONE_SIDED,
                    table: "Messages in one direction, only one side under shunt",
                    lines: All,
                    quantity: Quantity::MEGABYTES,
                    form: CLIENT_ONLY,
                },
            ]),
        },
        Exhibit {
            name: "Figure 5",
            shows: "NetPIPE in C: a message there and back, by size, also across containers",
            answer: Measured(&[
                Claim {
                    what: "less than 64 KB",
                    theirs: Between(1.7, 2.5),
                    place: "5.1.3",
                    kind: Gain,
                    command: ROUND_TRIP,
                    table: TWO_CORES,
                    lines: Span(0.0, 65535.0),
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
                Claim {
                    what: "64 KB and more",
                    theirs: AtLeast(1.4),
                    place: "5.1.3",
                    kind: Gain,
                    command: ROUND_TRIP,
                    table: TWO_CORES,
                    lines: Span(65536.0, f64::INFINITY),
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
                Claim {
                    what: "across two containers (ours: network namespaces on a bridge)",
                    theirs: Between(2.5, 4.5),
                    place: "5.3.1",
                    kind: Gain,
                    command: ROUND_TRIP,
                    table: "Round trip, blocking, two network namespaces on a bridge",
                    lines: All,
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
                Claim {
                    what: "across two containers of Docker",
                    theirs: Between(2.5, 4.5),
                    place: "5.3.1",
                    kind: Gain,
                    command: CONTAINERS,
                    table: "Round trip, blocking, two containers of Docker",
                    lines: All,
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
            ]),
        },
        Exhibit {
            name: "Figure 6",
            shows: "NetPIPE in Java: a message there and back, by size",
            answer: Measured(&[
                Claim {
                    what: "less than 64 KB",
                    theirs: Between(1.7, 2.5),
                    place: "5.1.3",
                    kind: Gain,
                    command: RUNTIMES,
                    table: "Round trip in Java",
                    lines: Span(0.0, 65535.0),
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
                Claim {
                    what: "64 KB and more",
                    theirs: AtLeast(1.4),
                    place: "5.1.3",
                    kind: Gain,
                    command: RUNTIMES,
                    table: "Round trip in Java",
                    lines: Span(65536.0, f64::INFINITY),
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
            ]),
        },
        Exhibit {
            name: "Figure 7",
            shows: "memcached, values of 1 B to 4 KB, by number of connections",
            answer: Measured(&[
                Claim {
                    what: "operations a second",
                    theirs: Between(1.25, 2.0),
                    place: "5.2.1",
                    kind: Gain,
                    command: MEMCACHED,
                    table: "memcached, 9 gets to a set",
                    lines: Only(&[
                        "1 B to 4 KB, 1 connections",
                        "1 B to 4 KB, 8 connections",
                        "1 B to 4 KB, 50 connections",
                        "1 B to 4 KB, 128 connections",
                        "1 B to 4 KB, 512 connections",
                    ]),
                    quantity: Quantity::RATE,
                    form: TO_TCP,
                },
                Claim {
                    what: "only the client under shunt",
                    theirs: Between(0.97, 0.99),
                    place: "5.2.1",
                    kind: Cost,
                    command: ONE_SIDED,
                    table: "Only one side under shunt",
                    lines: Only(&["memcached, 50 connections"]),
                    quantity: Quantity::RATE,
                    form: CLIENT_ONLY,
                },
            ]),
        },
        Exhibit {
            name: "Figure 8",
            shows: "PostgreSQL with pgbench, TPC-B, by scale",
            answer: Measured(&[Claim {
                what: "transactions a second",
                theirs: Words("hardly faster"),
                place: "5.2.2",
                kind: Gain,
                command: POSTGRES,
                table: "PostgreSQL, TPC-B",
                lines: All,
                quantity: Quantity::RATE,
                form: TO_TCP,
            }]),
        },
        Exhibit {
            name: "Figure 9",
            shows: "PostgreSQL with pgbench, SELECT only, by scale",
            answer: Measured(&[Claim {
                what: "transactions a second",
                theirs: Between(1.16, 1.23),
                place: "5.2.2",
                kind: Gain,
                command: POSTGRES,
                table: "PostgreSQL, SELECT",
                lines: All,
                quantity: Quantity::RATE,
                form: TO_TCP,
            }]),
        },
        Exhibit {
            name: "Figure 10",
            shows: "memcached as in Figure 7, across two containers",
            answer: Measured(&[Claim {
                what: "operations a second (ours: in network namespaces on a bridge)",
                theirs: Between(2.0, 3.0),
                place: "5.3.2",
                kind: Gain,
                command: MEMCACHED,
                table: "memcached, 9 gets to a set",
                lines: Only(&[
                    "the same, 1, across two containers",
                    "the same, 8, across two containers",
                    "the same, 50, across two containers",
                    "the same, 128, across two containers",
                    "the same, 512, across two containers",
                ]),
                quantity: Quantity::RATE,
                form: TO_TCP,
            }]),
        },
        Exhibit {
            name: "Table 1",
            shows: "what others before did, by features",
            answer: NotMeasured("there are no figures in it"),
        },
    ],
};

const COST: &str = "local cost --seconds 0.3";
const ONE_SIDED: &str = "local one-sided --sides tcp-nodelay,client-only --seconds 0.3";
const ROUND_TRIP: &str = "local round-trip --sides tcp,unix,shunt --seconds 0.3";
const CONTAINERS: &str = "local containers --sides tcp,shunt --seconds 0.3";
const STREAM: &str = "local stream --sides tcp,tcp-nodelay,unix,shunt --seconds 0.3";
const MEMCACHED: &str = "local memcached --sides tcp,unix,shunt";
const RUNTIMES: &str = "local runtimes --sides tcp,unix,shunt";
const POSTGRES: &str = "local postgres-scales --sides tcp,unix,shunt";

const TWO_CORES: &str = "Round trip, blocking, two cores";

const TO_TCP: Form = Form::TimesAsFast("shunt", "TCP");
const TO_PLAIN: Form = Form::TimesAsFast("shunt", "TCP nodelay");
const CLIENT_ONLY: Form = Form::TimesAsFast("client only", "TCP nodelay");
