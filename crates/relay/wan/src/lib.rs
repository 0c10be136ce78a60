//! A wide-area link between two network namespaces of one machine, for tests and comparisons. It
//! has a one-way delay, a rate, a bounded queue with tail drop, seeded random loss and an MTU, and
//! carries IPv4 and IPv6.
//!
//! Each end is a [`Tun`] device, made in the namespace of that end. A [`Link`] is a thread that
//! carries packets between two of them:
//!
//! ```text
//! namespace A                                            namespace B
//! TCP ─► Tun ─► queue ─► rate ─► loss ─► delay ─► coalescing ─► Tun ─► TCP
//! ```
//!
//! The kernel hands over TCP data in pieces of up to 64 KB, as to a network card with segmentation
//! offload. The link accounts for every packet of MTU size that such a piece would become on a
//! wire. Each packet takes its time at the link's rate, its place in the queue and its chance of
//! loss. Only the delivery is batched: packets of a piece that have arrived since the last delivery
//! are written together, as a network card with interrupt coalescing and receive offload does. So
//! two processors carry hundreds of megabits a second over delays of hundreds of milliseconds.
//!
//! With equal seeds, equal sequences of packets lose the same packets.

#![forbid(unsafe_code)]

mod link;
mod packet;
mod pipe;
mod tun;

pub use link::{Counts, Direction, Link};
pub use pipe::Config;
pub use tun::{OpenError, Tun};
