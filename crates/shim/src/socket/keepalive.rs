//! Keepalive probes of TCP's own, for connections that something on the way may forget.
//!
//! A connection whose bytes all go by lanes sends no segment. Connection tracking, address translation and load balancers forget
//! a connection that is silent, and then neither its end nor a fallback to TCP gets through. So the shim has the kernel
//! probe such a connection ([`Keepalive::arm`]): four socket options, no timer and no thread of its own. A probe and its answer
//! carry no byte of the stream, so that no count of it changes.
//!
//! What the program has set is kept here meanwhile, and is what it is told. It is put back when the connection leaves
//! shared memory ([`Keepalive::disarm`]), and around each setsockopt of the program's ([`Keepalive::pause`]).
//!
//! ```text
//!            arm                      setsockopt of one of the four
//!   Own -----------> Armed(settings) -----------------------> Paused
//!     ^                 |      ^                                 |
//!     +----- disarm ----+      +----------- resume --------------+
//! ```

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::base::kernel::{option, set_option};

/// The greatest TCP_KEEPIDLE and TCP_KEEPINTVL that the kernel takes, in seconds.
const LONGEST: c_int = 32_767;
/// The greatest TCP_KEEPCNT that it takes.
const MOST: c_int = 127;

/// How long a connection may be silent, in seconds; 0: for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Silence {
    pub(crate) open: u16,
    pub(crate) half_closed: u16,
}

impl Silence {
    /// Reads what the broker says.
    pub(crate) fn new(open: u32, half_closed: u32) -> Silence {
        let seconds = |told: u32| told.min(LONGEST as u32) as u16;
        Silence { open: seconds(open), half_closed: seconds(half_closed) }
    }

    fn pack(self) -> u32 {
        u32::from(self.open) | u32::from(self.half_closed) << 16
    }

    fn unpack(word: u32) -> Silence {
        Silence { open: word as u16, half_closed: (word >> 16) as u16 }
    }
}

/// The four socket options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    /// SO_KEEPALIVE.
    is_on: bool,
    /// TCP_KEEPIDLE.
    idle: c_int,
    /// TCP_KEEPINTVL.
    interval: c_int,
    /// TCP_KEEPCNT.
    count: c_int,
}

/// Beside packed settings: there are some.
const KEPT: u64 = 1 << 63;

impl Settings {
    /// Reads them from the kernel. `None`: they could not be put back, as defaults of the system that no program can set.
    fn read(fd: RawFd) -> Option<Settings> {
        let tcp = |name| option::<c_int>(fd, libc::IPPROTO_TCP, name);
        let settings = Settings {
            is_on: option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE)? != 0,
            idle: tcp(libc::TCP_KEEPIDLE)?,
            interval: tcp(libc::TCP_KEEPINTVL)?,
            count: tcp(libc::TCP_KEEPCNT)?,
        };
        let Settings { idle, interval, count, .. } = settings;
        let can_be_set =
            (1..=LONGEST).contains(&idle) && (1..=LONGEST).contains(&interval) && (1..=MOST).contains(&count);
        can_be_set.then_some(settings)
    }

    /// Sets what differs from `old`. The idle time comes last: the kernel then counts it from the last segment that has come.
    fn write(self, fd: RawFd, old: Settings) {
        let Settings { is_on, idle, interval, count } = self;
        if is_on != old.is_on {
            set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, is_on.into());
        }
        if interval != old.interval {
            set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, interval);
        }
        if count != old.count {
            set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, count);
        }
        if idle != old.idle || is_on && !old.is_on {
            set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, idle);
        }
    }

    /// Returns the settings that probe each `silence` seconds and are otherwise as patient with a peer that does not answer as
    /// these. `None`: these probe as often themselves.
    ///
    /// The kernel probes first when nothing has come for the idle time. It then comes back after the interval, answered or not,
    /// so the interval must be as short.
    fn probing(self, silence: c_int) -> Option<Settings> {
        let Settings { is_on, idle, interval, count } = self;
        if !is_on {
            return Some(Settings { is_on: true, idle: silence, interval: silence, count: MOST });
        }
        if idle.max(interval) <= silence {
            return None;
        }
        // The program has a dead peer found after this time, of which the idle time comes first.
        let patience = idle + interval * count;
        let idle = idle.min(silence);
        let interval = silence.min(patience - idle);
        let count = ((patience - idle + interval / 2) / interval).clamp(1, MOST);
        Some(Settings { is_on: true, idle, interval, count })
    }

    fn pack(self) -> u64 {
        let Settings { is_on, idle, interval, count } = self;
        KEPT | u64::from(is_on) << 48 | (idle as u64) << 32 | (interval as u64) << 16 | count as u64
    }

    fn unpack(word: u64) -> Option<Settings> {
        let field = |shift: u32| (word >> shift) as u16;
        let (idle, interval, count) = (field(32).into(), field(16).into(), field(0).into());
        (word & KEPT != 0).then_some(Settings { is_on: field(48) & 1 != 0, idle, interval, count })
    }

    /// Returns the value of one of the four options.
    fn value(self, level: c_int, name: c_int) -> Option<c_int> {
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => Some(self.is_on.into()),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => Some(self.idle),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => Some(self.interval),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => Some(self.count),
            _ => None,
        }
    }
}

/// Returns whether an option is one of the four.
pub(crate) fn concerns(level: c_int, name: c_int) -> bool {
    let of_tcp = [libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT];
    (level, name) == (libc::SOL_SOCKET, libc::SO_KEEPALIVE)
        || level == libc::IPPROTO_TCP && of_tcp.contains(&name)
}

/// The probes of one connection. Changed under the lock of its sending side.
#[derive(Default)]
pub(crate) struct Keepalive {
    /// The program's [`Settings`], packed, while the kernel has others; else 0.
    own: AtomicU64,
    /// What the kernel has then, packed.
    set: AtomicU64,
    /// The [`Silence`] that the broker has asked for, packed; 0: the connection is not on shared memory, or needs none.
    silence: AtomicU32,
    /// One of the two ends has finished.
    is_half_closed: AtomicU32,
}

impl Keepalive {
    /// Begins to probe, for a connection that comes onto shared memory.
    pub(crate) fn arm(&self, fd: RawFd, silence: Silence) {
        if silence.open != 0 {
            self.silence.store(silence.pack(), Relaxed);
            self.resume(fd);
        }
    }

    /// Returns whether something on the way may forget the connection, which is on shared memory.
    #[inline]
    pub(crate) fn is_needed(&self) -> bool {
        self.silence.load(Relaxed) != 0
    }

    /// Puts back what the program has set, for good.
    pub(crate) fn disarm(&self, fd: RawFd) {
        if self.silence.swap(0, Relaxed) != 0 {
            self.pause(fd);
        }
    }

    /// Puts back what the program has set, until [`resume`](Self::resume).
    pub(crate) fn pause(&self, fd: RawFd) {
        let own = Settings::unpack(self.own.load(Relaxed));
        if let (Some(own), Some(set)) = (own, Settings::unpack(self.set.load(Relaxed))) {
            own.write(fd, set);
            self.own.store(0, Release);
        }
    }

    /// Goes on probing, if the connection is to be probed.
    pub(crate) fn resume(&self, fd: RawFd) {
        let Silence { open, half_closed } = Silence::unpack(self.silence.load(Relaxed));
        let silence = if self.is_half_closed.load(Relaxed) != 0 { half_closed.min(open) } else { open };
        if silence == 0 || self.own.load(Relaxed) != 0 {
            return;
        }
        if let Some(own) = Settings::read(fd)
            && let Some(set) = own.probing(silence.into())
        {
            self.set.store(set.pack(), Relaxed);
            // Before the kernel has them, so that the program is never told of them.
            self.own.store(own.pack(), Release);
            set.write(fd, own);
        }
    }

    /// Probes as often as it takes once one of the two ends has finished: connection tracking forgets sooner then.
    pub(crate) fn half_close(&self, fd: RawFd) {
        if self.is_half_closed.swap(1, Relaxed) == 0 && self.is_needed() {
            self.pause(fd);
            self.resume(fd);
        }
    }

    /// Returns the program's value of an option, where the kernel has another.
    pub(crate) fn own_value(&self, level: c_int, name: c_int) -> Option<c_int> {
        Settings::unpack(self.own.load(Acquire))?.value(level, name)
    }

    /// Forgets all of it: the socket has been closed.
    pub(crate) fn clear(&self) {
        self.own.store(0, Relaxed);
        self.silence.store(0, Relaxed);
        self.is_half_closed.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: Settings = Settings { is_on: false, idle: 7200, interval: 75, count: 9 };

    #[test]
    fn settings_come_back_as_they_went() {
        for settings in [DEFAULTS, Settings { is_on: true, idle: LONGEST, interval: LONGEST, count: MOST }] {
            assert_eq!(Settings::unpack(settings.pack()), Some(settings));
        }
        assert_eq!(Settings::unpack(0), None);
    }

    #[test]
    fn a_program_without_keepalive_has_its_peer_given_up_as_late_as_can_be() {
        let set = DEFAULTS.probing(60).unwrap();
        assert_eq!(set, Settings { is_on: true, idle: 60, interval: 60, count: 127 });
    }

    #[test]
    fn a_dead_peer_is_found_when_the_program_wants() {
        let total = |settings: Settings| settings.idle + settings.interval * settings.count;
        for (idle, interval, count) in [(7000, 60, 9), (300, 100, 3), (61, 1, 1), (120, 60, 10), (30, 75, 9)]
        {
            let own = Settings { is_on: true, idle, interval, count };
            let set = own.probing(60).unwrap();
            assert!(set.idle <= 60 && set.interval <= 60, "{set:?}");
            let (wanted, is) = (total(own), total(set));
            // To half an interval between probes.
            assert!((wanted - is).abs() <= set.interval / 2, "{own:?}: {wanted} s, {set:?}: {is} s");
        }
        // As late as the kernel's greatest count allows.
        let set = Settings { is_on: true, ..DEFAULTS }.probing(60).unwrap();
        assert_eq!(set, Settings { is_on: true, idle: 60, interval: 60, count: 127 });
    }

    #[test]
    fn a_program_that_probes_often_enough_keeps_its_settings() {
        let own = Settings { is_on: true, idle: 30, interval: 5, count: 3 };
        assert_eq!(own.probing(60), None);
        assert_eq!(own.probing(30), None);
        assert!(own.probing(29).is_some());
    }
}
