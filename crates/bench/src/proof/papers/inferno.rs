//! Inferno Nettverk's article on large messages between processes, passed as messages and as files.

use super::exhibit::Answer::Measured;
use super::exhibit::Kind::{Fact, Gain};
use super::exhibit::Lines::{All, Only};
use super::exhibit::Theirs::{About, Words};
use super::exhibit::{Claim, Exhibit, Form, Paper};
use crate::comparison::Quantity;

pub(super) const PAPER: Paper = Paper {
    name: "Inferno",
    title: "IPC performance: sockets vs files (Inferno Nettverk, 2015)",
    exhibits: &[
        Exhibit {
            name: "Results, first table",
            shows: "processor time of a million messages of 112,192 bytes, as messages and as files",
            answer: Measured(&[
                Claim {
                    what: "user and system, file to message",
                    theirs: About(93.7 / 34.4),
                    place: "Results",
                    kind: Fact,
                    command: IPC,
                    table: "messages",
                    lines: SIZE,
                    quantity: Quantity::CPU_OF_ONE,
                    form: FILE_OF_MESSAGE,
                },
                Claim {
                    what: "system, file to message",
                    theirs: About(83.5 / 27.9),
                    place: "Results",
                    kind: Fact,
                    command: IPC,
                    table: "messages",
                    lines: SIZE,
                    quantity: Quantity::SYSTEM_OF_ONE,
                    form: FILE_OF_MESSAGE,
                },
            ]),
        },
        Exhibit {
            name: "Results, sendmsg and recvmsg",
            shows: "time in both calls, of large and of empty messages",
            answer: Measured(&[Claim {
                what: "large to empty (theirs under strace, ours by a tracer in the kernel)",
                theirs: About(68.0 / 29.0),
                place: "Results",
                kind: Fact,
                command: IPC,
                table: "system calls",
                lines: Only(&["sendmsg and recvmsg"]),
                quantity: Quantity::CALL,
                form: Form::PartOf(MESSAGE, FILE),
            }]),
        },
        Exhibit {
            name: "Results, second table",
            shows: "time in the other calls that a file needs",
            answer: Measured(&[
                Claim {
                    what: "all of them, medians (theirs under strace)",
                    theirs: About(201.0),
                    place: "Results",
                    kind: Fact,
                    command: IPC,
                    table: "system calls",
                    lines: Only(&["other calls"]),
                    quantity: Quantity::CALL,
                    form: Form::Of(FILE),
                },
                Claim {
                    what: "what a file costs beyond a message",
                    theirs: About(160.0),
                    place: "Results",
                    kind: Fact,
                    command: IPC,
                    table: "messages",
                    lines: SIZE,
                    quantity: Quantity::EACH,
                    form: Form::Beyond(FILE, MESSAGE),
                },
            ]),
        },
        Exhibit {
            name: "Conclusion, session",
            shows: "what files add to a session of five messages in order, as the article's program has them",
            answer: Measured(&[
                Claim {
                    what: "file, beyond message",
                    theirs: About(1.0),
                    place: "Conclusion",
                    kind: Fact,
                    command: IPC,
                    table: "sessions",
                    lines: All,
                    quantity: Quantity::SESSION,
                    form: Form::Beyond(FILE, MESSAGE),
                },
                Claim {
                    what: "what our channel saves",
                    theirs: Words("not in the article"),
                    place: "",
                    kind: Gain,
                    command: IPC,
                    table: "sessions",
                    lines: All,
                    quantity: Quantity::SESSION,
                    form: Form::Saves("channel", MESSAGE),
                },
            ]),
        },
        Exhibit {
            name: "Addendum",
            shows: "queues in shared memory, and compressed messages, to the socket",
            answer: Measured(&[
                Claim {
                    what: "queue with fcntl locks",
                    theirs: About(0.5),
                    place: "Addendum",
                    kind: Fact,
                    command: IPC,
                    table: "messages",
                    lines: SIZE,
                    quantity: Quantity::RATE,
                    form: Form::TimesAsFast("queue, fcntl", MESSAGE),
                },
                Claim {
                    what: "queue with fewer fcntl locks",
                    theirs: About(0.75),
                    place: "Addendum",
                    kind: Fact,
                    command: IPC,
                    table: "messages",
                    lines: SIZE,
                    quantity: Quantity::RATE,
                    form: Form::TimesAsFast("queue, few locks", MESSAGE),
                },
                Claim {
                    what: "gzip",
                    theirs: About(1.0 / 40.0),
                    place: "Addendum",
                    kind: Fact,
                    command: IPC,
                    table: "messages",
                    lines: SIZE,
                    quantity: Quantity::RATE,
                    form: Form::TimesAsFast("gzip", MESSAGE),
                },
                Claim {
                    what: "our channel",
                    theirs: Words("not in the article"),
                    place: "",
                    kind: Gain,
                    command: IPC,
                    table: "messages",
                    lines: SIZE,
                    quantity: Quantity::RATE,
                    form: Form::TimesAsFast("channel", MESSAGE),
                },
            ]),
        },
    ],
};

const IPC: &str = "ipc --sizes 112192";
const SIZE: super::exhibit::Lines = Only(&["112192 B"]);

const MESSAGE: &str = "datagram";
const FILE: &str = "file";

const FILE_OF_MESSAGE: Form = Form::PartOf(FILE, MESSAGE);
