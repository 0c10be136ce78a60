//! The counters of the cache, as `stats` and the service's own status show them.

use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::commands::Tokens;
use super::commands::said;
use super::{Cache, MAX_ITEM};
use crate::cache::memory::{Head, now};

/// Counters of commands that user space served.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Commands {
    pub(super) get: u64,
    pub(super) get_hits: u64,
    pub(super) set: u64,
    pub(super) touch: u64,
    pub(super) touch_hits: u64,
    pub(super) flush: u64,
    pub(super) meta: u64,
    pub(super) delete_hits: u64,
    pub(super) delete_misses: u64,
    pub(super) incr_hits: u64,
    pub(super) incr_misses: u64,
    pub(super) decr_hits: u64,
    pub(super) decr_misses: u64,
    pub(super) cas_hits: u64,
    pub(super) cas_misses: u64,
    pub(super) cas_badval: u64,
    pub(super) too_large: u64,
}

/// Locks counters, which no panic leaves wrong.
pub(super) fn locked(commands: &Mutex<Commands>) -> MutexGuard<'_, Commands> {
    commands.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Commands {
    fn plus(self, other: Commands) -> Commands {
        const COUNTERS: usize = size_of::<Commands>() / size_of::<u64>();
        let mut sum: [u64; COUNTERS] = zerocopy::transmute!(self);
        let more: [u64; COUNTERS] = zerocopy::transmute!(other);
        sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        zerocopy::transmute!(sum)
    }
}

impl Cache {
    /// Returns the counters of all threads.
    fn commands(&self) -> Commands {
        self.commands.all().map(|commands| *locked(commands)).fold(Commands::default(), Commands::plus)
    }

    /// Returns the counters of items, and of reads by both engines: name, value, and whether it only
    /// grows.
    pub(super) fn measured(&self) -> Vec<(&'static str, u64, bool)> {
        let (items, commands) = (self.items().counters, self.commands());
        let [hits, misses, left] = self.of_kernel();
        vec![
            ("items", items.items, false),
            ("bytes", items.bytes, false),
            ("limit_bytes", self.store().len() as u64, false),
            ("evictions", items.evictions, true),
            ("expired", items.expired, true),
            ("get_hits", commands.get_hits + hits, true),
            ("get_misses", commands.get - commands.get_hits + misses, true),
            ("kernel_get_hits", hits, true),
            ("kernel_get_misses", misses, true),
            ("kernel_left", left, true),
            ("sets", commands.set, true),
        ]
    }

    fn of_kernel(&self) -> [u64; 3] {
        [Head::KernelHits, Head::KernelMisses, Head::KernelLeft].map(|word| self.memory.head(word))
    }

    pub(super) fn stats(&self, tokens: &Tokens<'_>) -> Vec<u8> {
        match (tokens.count(), tokens.at(1)) {
            (2, _) => self.all_stats(),
            (_, b"reset") => {
                self.commands.all().for_each(|commands| *locked(commands) = Commands::default());
                let mut items = self.items();
                let counters = items.counters;
                items.counters = super::items::Counters {
                    items: counters.items,
                    bytes: counters.bytes,
                    ..Default::default()
                };
                for word in [Head::KernelHits, Head::KernelMisses, Head::KernelLeft] {
                    self.memory.set_head(word, 0);
                }
                said(b"RESET")
            }
            (_, b"settings") => self.settings(),
            _ => said(b"ERROR"),
        }
    }

    fn all_stats(&self) -> Vec<u8> {
        let (items, commands) = (self.items().counters, self.commands());
        let [hits, misses, left] = self.of_kernel();
        let mut text = String::new();
        let mut line = |name: &str, value: u64| {
            let _ = write!(text, "STAT {name} {value}\r\n");
        };
        line("pid", std::process::id().into());
        line("uptime", self.began.elapsed().as_secs());
        line("time", (self.zero + i64::from(now().0)).cast_unsigned());
        let _ = write!(text, "STAT version 1.6.18\r\n");
        let mut line = |name: &str, value: u64| {
            let _ = write!(text, "STAT {name} {value}\r\n");
        };
        line("pointer_size", u64::from(usize::BITS));
        line("curr_connections", self.counts.open.load(Relaxed).cast_unsigned());
        line("total_connections", self.counts.connections.load(Relaxed));
        line("cmd_get", commands.get + hits + misses);
        line("cmd_set", commands.set);
        line("cmd_flush", commands.flush);
        line("cmd_touch", commands.touch);
        line("cmd_meta", commands.meta);
        line("get_hits", commands.get_hits + hits);
        line("get_misses", commands.get - commands.get_hits + misses);
        line("get_expired", items.expired);
        line("get_flushed", items.flushed);
        line("get_hits_in_kernel", hits);
        line("get_misses_in_kernel", misses);
        line("get_left_by_kernel", left);
        line("delete_misses", commands.delete_misses);
        line("delete_hits", commands.delete_hits);
        line("incr_misses", commands.incr_misses);
        line("incr_hits", commands.incr_hits);
        line("decr_misses", commands.decr_misses);
        line("decr_hits", commands.decr_hits);
        line("cas_misses", commands.cas_misses);
        line("cas_hits", commands.cas_hits);
        line("cas_badval", commands.cas_badval);
        line("touch_hits", commands.touch_hits);
        line("touch_misses", commands.touch - commands.touch_hits);
        line("store_too_large", commands.too_large);
        line("limit_maxbytes", self.store().len() as u64);
        line("accepting_conns", 1);
        line("threads", self.threads as u64);
        line("bytes", items.bytes);
        line("curr_items", items.items);
        line("total_items", items.total);
        line("evicted_unfetched", items.evicted_unfetched);
        line("evictions", items.evictions);
        line("moved_bytes", items.moved);
        text.push_str("END\r\n");
        text.into_bytes()
    }

    fn settings(&self) -> Vec<u8> {
        format!(
            "STAT maxbytes {}\r\nSTAT verbosity {}\r\nSTAT evictions on\r\nSTAT num_threads {}\r\n\
             STAT detail_enabled no\r\nSTAT cas_enabled yes\r\nSTAT flush_enabled yes\r\n\
             STAT item_size_max {MAX_ITEM}\r\nSTAT binding_protocol ascii\r\nEND\r\n",
            self.store().len(),
            self.counts.verbosity.load(Relaxed),
            self.threads,
        )
        .into_bytes()
    }
}
