//! Keepalive probes by TCP, for connections that a device on the path may forget.
//!
//! A connection that uses only lanes sends no TCP segment. Connection tracking, address translation
//! and load balancers forget a silent connection. Then neither its end nor a fallback to TCP gets
//! through. So the shim makes the kernel probe such a connection ([`Keepalive::arm`]). That takes
//! four socket options, and neither a timer nor a thread. A probe and its answer carry no byte of
//! the stream, so no count of it changes.
//!
//! Meanwhile the program's settings are stored here, and getsockopt returns them. The kernel gets
//! them back when the connection falls back ([`Keepalive::disarm`]), and around each setsockopt of
//! the program ([`Keepalive::pause`]).
//!
//! ```text
//!            arm                      setsockopt of one of the four
//!   Own -----------> Armed(settings) -----------------------> Paused
//!     ^                 |      ^                                 |
//!     +----- disarm ----+      +----------- resume --------------+
//! ```
//!
//! Example: the broker asks for a probe each 60 s. The program has keepalive off. `arm` stores
//! these settings and turns keepalive on, with an idle time and an interval of 60 s. The program's
//! getsockopt still returns "off". When the connection falls back, `disarm` turns keepalive off
//! again.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::base::kernel::{option, set_option};

/// The greatest TCP_KEEPIDLE and TCP_KEEPINTVL that the kernel accepts, in seconds.
const LONGEST: c_int = 32_767;
/// The greatest TCP_KEEPCNT that the kernel accepts.
const MOST: c_int = 127;

/// How long a connection may be silent, in seconds; 0 means without a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Silence {
    pub(crate) open: u16,
    pub(crate) half_closed: u16,
}

impl Silence {
    /// Makes a `Silence` from the seconds in a message of the broker.
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

/// A bit of packed settings, so that none are 0.
const KEPT: u64 = 1 << 63;

impl Settings {
    /// Reads the settings from the kernel. Returns `None` if setsockopt would not accept them
    /// later, as with system defaults beyond the limits.
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

    /// Writes the settings that differ from `old`. The idle time comes last, because the kernel
    /// then counts it from the last segment that has arrived.
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

    /// Returns the settings that probe each `silence` seconds. A peer that does not answer is given
    /// up after the same time as with `self`. Returns `None` if `self` probes often enough.
    ///
    /// The kernel sends the first probe after the idle time without a segment. It sends the next
    /// ones after the interval, whether or not there was an answer, so the interval must be as
    /// short.
    fn probing(self, silence: c_int) -> Option<Settings> {
        let Settings { is_on, idle, interval, count } = self;
        if !is_on {
            return Some(Settings { is_on: true, idle: silence, interval: silence, count: MOST });
        }
        if idle.max(interval) <= silence {
            return None;
        }
        // The time after which the program's settings give up a dead peer. It begins with the idle
        // time.
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
#[derive(Debug, Default)]
pub(crate) struct Keepalive {
    /// The program's [`Settings`], packed, while the kernel has others; else 0.
    own: AtomicU64,
    /// The settings that the kernel has meanwhile, packed.
    set: AtomicU64,
    /// The [`Silence`] that the broker has asked for, packed. It is 0 if the connection is
    /// detached, or needs no probes.
    silence: AtomicU32,
    /// Set once one of the two ends has finished its stream.
    is_half_closed: AtomicU32,
}

impl Keepalive {
    /// Starts to probe a connection that has been attached.
    pub(crate) fn arm(&self, fd: RawFd, silence: Silence) {
        if silence.open != 0 {
            self.silence.store(silence.pack(), Relaxed);
            self.resume(fd);
        }
    }

    /// Returns whether the connection is attached and a device on the path may forget it.
    #[inline]
    pub(crate) fn is_needed(&self) -> bool {
        self.silence.load(Relaxed) != 0
    }

    /// Restores the program's settings for good.
    pub(crate) fn disarm(&self, fd: RawFd) {
        if self.silence.swap(0, Relaxed) != 0 {
            self.pause(fd);
        }
    }

    /// Restores the program's settings until [`resume`](Self::resume).
    pub(crate) fn pause(&self, fd: RawFd) {
        let own = Settings::unpack(self.own.load(Relaxed));
        if let (Some(own), Some(set)) = (own, Settings::unpack(self.set.load(Relaxed))) {
            own.write(fd, set);
            self.own.store(0, Release);
        }
    }

    /// Starts to probe again, if the connection needs probes.
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
            // Stored before the kernel has the new settings, so that getsockopt never returns
            // those.
            self.own.store(own.pack(), Release);
            set.write(fd, own);
        }
    }

    /// Adjusts the probes after one of the two ends has finished. Connection tracking forgets such
    /// a connection sooner.
    pub(crate) fn half_close(&self, fd: RawFd) {
        if self.is_half_closed.swap(1, Relaxed) == 0 && self.is_needed() {
            self.pause(fd);
            self.resume(fd);
        }
    }

    /// Returns the program's value of an option, if the kernel has another.
    pub(crate) fn own_value(&self, level: c_int, name: c_int) -> Option<c_int> {
        Settings::unpack(self.own.load(Acquire))?.value(level, name)
    }

    /// Resets the state after the socket has been closed.
    pub(crate) fn clear(&self) {
        let Keepalive { own, set, silence, is_half_closed } = self;
        own.store(0, Relaxed);
        set.store(0, Relaxed);
        silence.store(0, Relaxed);
        is_half_closed.store(0, Relaxed);
    }

    /// Sets each field to a value that no new connection has.
    #[cfg(test)]
    pub(crate) fn use_up(&self) {
        self.own.store(1, Relaxed);
        self.set.store(2, Relaxed);
        self.silence.store(3, Relaxed);
        self.is_half_closed.store(4, Relaxed);
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
            // Equal up to half an interval.
            assert!((wanted - is).abs() <= set.interval / 2, "{own:?}: {wanted} s, {set:?}: {is} s");
        }
        // As late as the greatest count allows.
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
