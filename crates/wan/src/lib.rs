//! A wide-area link for tests and comparisons, between two network namespaces of one machine: one-way delay, rate, a
//! bounded queue with tail drop, seeded random loss, MTU; IPv4 and IPv6.
//!
//! Each end is a [`Tun`] device, made in the namespace of that end. A [`Link`] is a thread that carries packets between
//! two of them. The kernel hands over what TCP sends in pieces of up to 64 KB, as to a network card that segments by itself.
//! The link accounts for every packet of MTU size that such a piece would become on a wire: each takes its time at the
//! link's rate, its place in the queue and its chance to be lost. Only its delivery is shared again: what has arrived of
//! a piece since the last delivery is written at once, as a network card that coalesces interrupts and packets does.
//! So two processors carry many hundred megabits a second over hundreds of milliseconds.
//!
//! With the same seed, the same sequence of packets loses the same ones.

#![forbid(unsafe_code)]

mod link;
mod packet;
mod pipe;
mod tun;

pub use link::{Counts, Direction, Link};
pub use pipe::Config;
pub use tun::{OpenError, Tun};
