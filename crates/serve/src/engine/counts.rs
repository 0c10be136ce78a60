//! Counters of a service since its start, with the same names in `shunt serve status`, its JSON and
//! the metrics.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use crate::service::Refusal;

/// A monotonic counter.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Declares an enum of reasons, each with its label and its meaning.
macro_rules! reasons {
    ($(#[$outer:meta])* $name:ident says $text:ident { $($variant:ident, $label:literal, $meaning:literal;)+ }) => {
        reasons! { $(#[$outer])* $name { $($variant, $label, $meaning;)+ } }

        impl $name {
            /// Returns the meaning, in words for a person.
            pub(crate) fn $text(self) -> &'static str {
                match self { $($name::$variant => $meaning),+ }
            }
        }
    };
    ($(#[$outer:meta])* $name:ident { $($variant:ident, $label:literal, $text:literal;)+ }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $(#[doc = $text] $variant),+ }

        impl $name {
            pub(crate) const ALL: &'static [$name] = &[$($name::$variant),+];

            pub(crate) fn label(self) -> &'static str {
                match self { $($name::$variant => $label),+ }
            }
        }
    };
}

reasons! {
    /// Why a conversation moved from one engine to the other. The reasons from the second on, up to
    /// `NoPlace`, are the kernel's, in the order of `enum shunt_leave` in engine.bpf.h.
    Move says text {
        Calm, "calm", "one message at a time: the kernel is faster";
        Partial, "partial", "a message did not arrive in one piece";
        Coalesced, "coalesced", "several messages arrived in one piece";
        Refused, "refused", "a message cannot be served, and is answered from user space";
        Unusual, "unusual", "the service decided what only user space does: a reply of its own, a close";
        NoConnection, "no-connection", "the backend has no connection in this conversation yet";
        Outstanding, "outstanding", "several messages are under way at once: batching is faster";
        Busy, "busy", "messages come so fast that batching is faster";
        BackendFull, "backend-full", "a backend does not keep up: the client is to wait";
        ClientFull, "client-full", "the client does not read its answers";
        Reply, "reply", "a backend sent what is no single reply to the message under way";
        TooLongToKeep, "too-long-to-keep", "a message that may be sent again is too long to be kept in the kernel";
        NoRedirect, "no-redirect", "the kernel did not know where to send a message";
        KeyHash, "key-hash", "the kernel cannot choose a backend by this key";
        Content, "content", "the content store has no current answer that fits: user space looks again";
        NoPlace, "no-place", "the backend has no place in the kernel: it came after the start, or is beyond the 255th";
        Ended, "ended", "an end closed its connection";
        Reload, "reload", "the backends changed";
        Stop, "stop", "shunt serve ends";
        Plain, "plain", "busy in user space: the kernel is not asked about its messages any more";
        Silent, "silent", "a backend has not answered within the reply-timeout";
        Event, "event", "a timer is due, or another connection sends something";
        Slower, "slower", "measured: user space serves these clients faster";
        Late, "late", "the kernel's worker threads have to wait for a processor";
    }
}

reasons! {
    /// Why a message or a reply was not delivered, besides the service's refusals.
    Loss {
        Service, "service", "the service dropped it";
        CutShort, "cut-short", "the client went away in the middle of it";
        Cut, "cut", "the backend went away in the middle of it";
        Surplus, "surplus", "a backend sent it, and nobody asked";
        Slow, "slow", "the client does not read what others send it, and was closed";
        Topics, "topics", "the connection has too many subscriptions";
        LateReply, "late-reply", "the client went away before the reply came";
    }
}

/// The counters of a service, for one thread or for all.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) clients: Count,
    pub(crate) open: AtomicI64,
    pub(crate) in_kernel: AtomicI64,
    /// Bytes buffered in user space by all conversations.
    pub(crate) queued: AtomicI64,
    /// Messages and bytes of clients, by the engine that served them: user space, kernel.
    pub(crate) messages: [Count; 2],
    pub(crate) bytes: [Count; 2],
    pub(crate) replies: Count,
    pub(crate) retried: Count,
    /// Bytes of messages without replies that a backend had not acknowledged when its connection
    /// broke.
    pub(crate) unacknowledged: Count,
    refusals: [Count; Refusal::ALL.len()],
    losses: [Count; Loss::ALL.len()],
    moves: [Count; Move::ALL.len()],
}

/// The index of the user-space engine in the pairs of [`Counts`].
pub(crate) const USER: usize = 0;
/// The index of the kernel engine in those pairs.
pub(crate) const KERNEL: usize = 1;

impl Counts {
    /// Returns the sums of the threads' counters.
    pub(crate) fn sum<'a>(threads: impl Iterator<Item = &'a Counts>) -> Counts {
        let sum = Counts::default();
        for counts in threads {
            let ((totals, levels), (more, more_levels)) = (sum.parts(), counts.parts());
            totals.zip(more).for_each(|(total, more)| total.add(more.value()));
            for (level, more) in levels.into_iter().zip(more_levels) {
                level.fetch_add(more.load(Relaxed), Relaxed);
            }
        }
        sum
    }

    /// Returns all counters: those that only grow, and those that do not.
    fn parts(&self) -> (impl Iterator<Item = &Count>, [&AtomicI64; 3]) {
        let Counts {
            clients,
            open,
            in_kernel,
            queued,
            messages,
            bytes,
            replies,
            retried,
            unacknowledged,
            refusals,
            losses,
            moves,
        } = self;
        let single = [clients, replies, retried, unacknowledged].into_iter().chain(messages).chain(bytes);
        (single.chain(refusals).chain(losses).chain(moves), [open, in_kernel, queued])
    }

    pub(crate) fn refused(&self, why: Refusal) {
        self.refusals[why as usize - 1].add(1);
    }

    pub(crate) fn lost(&self, why: Loss) {
        self.losses[why as usize].add(1);
    }

    pub(crate) fn moved(&self, why: Move) {
        self.moves[why as usize].add(1);
    }

    /// Returns the label and the count of each refusal and loss.
    pub(crate) fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let refusals = Refusal::ALL.iter().map(|why| why.label()).zip(&self.refusals);
        let losses = Loss::ALL.iter().map(|why| why.label()).zip(&self.losses);
        refusals.chain(losses).map(|(label, count)| (label, count.value()))
    }

    /// Returns the count of each reason for a move.
    pub(crate) fn moves(&self) -> impl Iterator<Item = (Move, u64)> {
        Move::ALL.iter().zip(&self.moves).map(|(why, count)| (*why, count.value()))
    }
}
