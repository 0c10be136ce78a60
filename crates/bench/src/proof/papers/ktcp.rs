//! KTCP: splitting TCP in the kernels of two relays.

use super::exhibit::Answer::Measured;
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
            shows: "time lines: end to end and split, of 50 KB (the ideal cannot be measured: shunt bench relay downloads tells it)",
            answer: Measured(&[
                Claim {
                    what: "first byte, end to end",
                    theirs: Words("a round trip for the connection, and one"),
                    place: "1",
                    kind: Fact,
                    command: TIME_LINES,
                    table: "time lines",
                    lines: Only(&["first byte at client"]),
                    quantity: Quantity::MOMENT,
                    form: Form::Of(ROUTED),
                },
                Claim {
                    what: "first byte, split, beyond end to end",
                    theirs: Words("later: connections one after the other"),
                    place: "1",
                    kind: Cost,
                    command: TIME_LINES,
                    table: "time lines",
                    lines: Only(&["first byte at client"]),
                    quantity: Quantity::MOMENT,
                    form: Form::Beyond(PLAIN, ROUTED),
                },
                Claim {
                    what: "last byte, split, beyond end to end, of small files",
                    theirs: Words("may be later"),
                    place: "1",
                    kind: Cost,
                    command: RELAY,
                    table: "downloads",
                    lines: Only(&["10 KB", "50 KB", "100 KB"]),
                    quantity: Quantity::LAST_BYTE,
                    form: Form::Beyond(PLAIN, ROUTED),
                },
                Claim {
                    what: "last byte, split, to end to end",
                    theirs: Words("sooner for larger files"),
                    place: "1",
                    kind: Gain,
                    command: RELAY,
                    table: "downloads",
                    lines: Only(&["1 MB", "10 MB", "50 MB"]),
                    quantity: Quantity::LAST_BYTE,
                    form: Form::TimesAsFast(PLAIN, ROUTED),
                },
            ]),
        },
        Exhibit {
            name: "Figure 2",
            shows: "time lines: what each improvement takes away, of 50 KB (b, the pool of threads, is at section 3)",
            answer: Measured(&[
                Claim {
                    what: "early SYN, until the server has a SYN",
                    theirs: Words("SYN-ACK and ACK, (1)"),
                    place: "2",
                    kind: Gain,
                    command: TIME_LINES,
                    table: "time lines",
                    lines: Only(&["SYN at server"]),
                    quantity: Quantity::MOMENT,
                    form: Form::Saves(EARLY, PLAIN),
                },
                Claim {
                    what: "warm connections, until the server has a SYN",
                    theirs: Words("the long handshake, (3)"),
                    place: "2",
                    kind: Gain,
                    command: TIME_LINES,
                    table: "time lines",
                    lines: Only(&["SYN at server"]),
                    quantity: Quantity::MOMENT,
                    form: Form::Saves(WARM, EARLY),
                },
                Claim {
                    what: "turbo start, until the last byte",
                    theirs: Words("slow start, (4)"),
                    place: "2",
                    kind: Gain,
                    command: TIME_LINES,
                    table: "time lines",
                    lines: Only(&["last byte at client"]),
                    quantity: Quantity::MOMENT,
                    form: Form::Saves(ALL, WARM),
                },
            ]),
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
            shows: "a switch between two threads or processes on one processor",
            answer: Measured(&[
                Claim {
                    what: "threads",
                    theirs: About(12.9 / 20.0),
                    place: "3, Cost of System Calls",
                    kind: Fact,
                    command: RELAYING,
                    table: "Switches",
                    lines: Only(&["switch between two threads"]),
                    quantity: Quantity::MEDIAN,
                    form: NATIVE,
                },
                Claim {
                    what: "processes",
                    theirs: About(15.6 / 20.0),
                    place: "3, Cost of System Calls",
                    kind: Fact,
                    command: RELAYING,
                    table: "Switches",
                    lines: Only(&["switch between two processes"]),
                    quantity: Quantity::MEDIAN,
                    form: NATIVE,
                },
                Claim {
                    what: "a look for what is ready, by which shunt relay goes on with another connection",
                    theirs: Words("0.16 us between threads of the kernel"),
                    place: "3, Cost of System Calls",
                    kind: Fact,
                    command: RELAYING,
                    table: "Switches",
                    lines: Only(&["epoll_wait with one ready"]),
                    quantity: Quantity::MEDIAN,
                    form: NATIVE,
                },
            ]),
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
                Claim {
                    what: "a thread that waits in a pool, woken and done",
                    theirs: Words("can start executing immediately"),
                    place: "3, Thread pool",
                    kind: Fact,
                    command: RELAYING,
                    table: "Switches",
                    lines: Only(&["a pool's thread woken, and done"]),
                    quantity: Quantity::MEDIAN,
                    form: NATIVE,
                },
            ]),
        },
        Exhibit {
            name: "Section 3, buffers",
            shows: "throughput by size of the buffer through which the relay forwards",
            answer: Measured(&[
                Claim {
                    what: "copied through 4 KB",
                    theirs: Words("degraded"),
                    place: "3, Memory Footprint",
                    kind: Fact,
                    command: RELAYING,
                    table: "A stream through a relay",
                    lines: Only(&["copied, 4 KiB"]),
                    quantity: Quantity::MEGABYTES,
                    form: NATIVE,
                },
                Claim {
                    what: "copied through 16 KB and more",
                    theirs: Words("levels out"),
                    place: "3, Memory Footprint",
                    kind: Fact,
                    command: RELAYING,
                    table: "A stream through a relay",
                    lines: Only(&["copied, 16 KiB", "copied, 64 KiB", "copied, 256 KiB"]),
                    quantity: Quantity::MEGABYTES,
                    form: NATIVE,
                },
                Claim {
                    what: "through a pipe without copying, which shunt relay does with 256 KB",
                    theirs: Words("not in the paper"),
                    place: "",
                    kind: Fact,
                    command: RELAYING,
                    table: "A stream through a relay",
                    lines: Only(&[
                        "spliced, 4 KiB",
                        "spliced, 16 KiB",
                        "spliced, 64 KiB",
                        "spliced, 256 KiB",
                    ]),
                    quantity: Quantity::MEGABYTES,
                    form: NATIVE,
                },
            ]),
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
const RELAYING: &str = "local relaying --seconds 0.3";
const IDLE: &str = "relay idle --ways routed,relay-turbo";

const TIME_LINES: &str = "relay time-lines --ways routed,relay,relay-early,relay-pool,relay-turbo";

/// A measurement that does not involve shunt.
const NATIVE: Form = Form::Of("TCP nodelay");

const ROUTED: &str = "routed, not split";
const PLAIN: &str = "shunt relay, plain";
const EARLY: &str = "+ early SYN";
const WARM: &str = "+ warm connections";
const ALL: &str = "+ turbo start";
