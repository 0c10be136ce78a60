//! Socket options, fcntl and ioctl: which of them a lane honours, and which make a connection fall
//! back to TCP.

use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::RawFd;

use libc::socklen_t;
use shunt_abi::reason::Reason;
use shunt_sys::memory;
use shunt_sys::tcp::LaneBytes;

use crate::base::private::borrow;
use crate::base::table::{self, Entry};
use crate::base::{errno, kernel, process, real};
use crate::epoll;
use crate::life::{attach, resets, untracked};
use crate::socket::endpoint::Endpoint;
use crate::socket::keepalive::{self, Keepalive};
use crate::socket::{incoming, lost, settings};

/// Constants of Linux that the libc crate does not have.
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;
const SIOCATMARK: c_ulong = 0x8905;
const SIOCOUTQNSD: c_ulong = 0x894b;
/// Requests of network interfaces, for which any socket will do.
const INTERFACES: std::ops::RangeInclusive<c_ulong> = 0x890b..=0x894a;

const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;
const SO_TIMESTAMPING_NEW: c_int = 65;
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;
const SO_PREFER_BUSY_POLL: c_int = 69;
const SO_BUSY_POLL_BUDGET: c_int = 70;
const SO_BUF_LOCK: c_int = 72;
const SO_RESERVE_MEM: c_int = 73;
const SO_TXREHASH: c_int = 74;
const SO_RCVMARK: c_int = 75;
const TCP_TX_DELAY: c_int = 37;
const TCP_RTO_MAX_MS: c_int = 44;
const TCP_RTO_MIN_US: c_int = 45;
const TCP_DELACK_MAX_US: c_int = 46;
const TCP_ZEROCOPY_RECEIVE: c_int = 35;

/// The value that a program sets.
#[derive(Clone, Copy)]
pub(crate) struct Setting {
    value: *const c_void,
    len: socklen_t,
}

impl Setting {
    pub(crate) fn new(value: *const c_void, len: socklen_t) -> Setting {
        Setting { value, len }
    }

    /// Reads the beginning of the value, if that is long enough.
    fn read<T: Copy>(self) -> Option<T> {
        let enough = self.len as usize >= size_of::<T>();
        // SAFETY: it can be read; callers ask for integers, for which every bit pattern is valid.
        (enough && memory::is_readable(self.value.cast(), size_of::<T>()))
            .then(|| unsafe { self.value.cast::<T>().read_unaligned() })
    }

    fn is(self, value: c_int) -> bool {
        self.read() == Some(value)
    }
}

/// Handles a setsockopt on an endpoint before the kernel does: if a lane cannot honour it, the
/// connection falls back.
pub(crate) fn before_set(endpoint: &Endpoint, level: c_int, name: c_int, setting: Setting) {
    let reason = match level {
        libc::SOL_SOCKET => against_socket_option(name, setting),
        libc::IPPROTO_TCP => against_tcp_option(name, setting),
        libc::IPPROTO_IP => against_ip_option(name),
        libc::IPPROTO_IPV6 => against_ipv6_option(name),
        _ => Some(Reason::SocketOption),
    };
    if let Some(reason) = reason {
        attach::bar(endpoint, settings::blame(endpoint, level, name, reason));
    }
    if endpoint.corrections.keepalive.is_needed() && keepalive::concerns(level, name) {
        attach::change_keepalive(endpoint, Keepalive::pause);
    }
}

fn against_socket_option(name: c_int, setting: Setting) -> Option<Reason> {
    match name {
        // These concern segments, memory, the way to a network card or later connections, none of
        // which a lane has. Or they cannot be set, and the kernel reports that.
        libc::SO_DEBUG
        | libc::SO_REUSEADDR
        | libc::SO_TYPE
        | libc::SO_ERROR
        | libc::SO_DONTROUTE
        | libc::SO_BROADCAST
        | libc::SO_SNDBUF
        | libc::SO_RCVBUF
        | libc::SO_SNDBUFFORCE
        | libc::SO_RCVBUFFORCE
        | libc::SO_KEEPALIVE
        | libc::SO_OOBINLINE
        | libc::SO_NO_CHECK
        | libc::SO_PRIORITY
        | libc::SO_LINGER
        | libc::SO_BSDCOMPAT
        | libc::SO_REUSEPORT
        | libc::SO_PASSCRED
        | libc::SO_PEERCRED
        | libc::SO_SNDLOWAT
        | libc::SO_ACCEPTCONN
        | libc::SO_PEERSEC
        | libc::SO_PASSSEC
        | libc::SO_DETACH_FILTER
        | libc::SO_PEERNAME
        | libc::SO_MARK
        | libc::SO_PROTOCOL
        | libc::SO_DOMAIN
        | libc::SO_RXQ_OVFL
        | libc::SO_WIFI_STATUS
        | libc::SO_NOFCS
        | libc::SO_LOCK_FILTER
        | libc::SO_SELECT_ERR_QUEUE
        | libc::SO_BUSY_POLL
        | libc::SO_BPF_EXTENSIONS
        | libc::SO_INCOMING_CPU
        | libc::SO_CNX_ADVICE
        | libc::SO_MEMINFO
        | libc::SO_INCOMING_NAPI_ID
        | libc::SO_COOKIE
        | libc::SO_PEERGROUPS
        | libc::SO_ZEROCOPY
        | SO_PREFER_BUSY_POLL
        | SO_BUSY_POLL_BUDGET
        | SO_BUF_LOCK
        | SO_RESERVE_MEM
        | SO_TXREHASH
        | SO_RCVMARK => None,
        // A negative timeout means not to wait at all, and cannot be distinguished from no timeout
        // afterwards.
        libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | SO_RCVTIMEO_NEW | SO_SNDTIMEO_NEW => {
            setting.read().filter(|seconds: &i64| *seconds < 0).map(|_| Reason::SocketOption)
        }
        libc::SO_RCVLOWAT if setting.read().is_none_or(|bytes: c_int| (0..=1).contains(&bytes)) => None,
        libc::SO_RCVLOWAT => Some(Reason::LowWater),
        libc::SO_TIMESTAMP
        | libc::SO_TIMESTAMPNS
        | libc::SO_TIMESTAMPING
        | SO_TIMESTAMP_NEW
        | SO_TIMESTAMPNS_NEW
        | SO_TIMESTAMPING_NEW
            if setting.is(0) =>
        {
            None
        }
        libc::SO_PEEK_OFF | libc::SO_MAX_PACING_RATE if setting.is(-1) => None,
        _ => Some(Reason::SocketOption),
    }
}

fn against_tcp_option(name: c_int, setting: Setting) -> Option<Reason> {
    match name {
        libc::TCP_NODELAY
        | libc::TCP_MAXSEG
        | libc::TCP_CORK
        | libc::TCP_KEEPIDLE
        | libc::TCP_KEEPINTVL
        | libc::TCP_KEEPCNT
        | libc::TCP_SYNCNT
        | libc::TCP_LINGER2
        | libc::TCP_DEFER_ACCEPT
        | libc::TCP_WINDOW_CLAMP
        | libc::TCP_INFO
        | libc::TCP_QUICKACK
        | libc::TCP_CONGESTION
        | libc::TCP_COOKIE_TRANSACTIONS
        | libc::TCP_THIN_LINEAR_TIMEOUTS
        | libc::TCP_THIN_DUPACK
        | libc::TCP_USER_TIMEOUT
        | libc::TCP_NOTSENT_LOWAT
        | libc::TCP_CC_INFO
        | libc::TCP_SAVE_SYN
        | libc::TCP_SAVED_SYN
        | libc::TCP_INQ
        | TCP_RTO_MAX_MS
        | TCP_RTO_MIN_US
        | TCP_DELACK_MAX_US => None,
        libc::TCP_REPAIR | TCP_TX_DELAY if setting.is(0) => None,
        libc::TCP_FASTOPEN
        | libc::TCP_FASTOPEN_CONNECT
        | libc::TCP_FASTOPEN_KEY
        | libc::TCP_FASTOPEN_NO_COOKIE => Some(Reason::FastOpen),
        _ => Some(Reason::SocketOption),
    }
}

/// Returns the reason against an IP option. There is none against one that concerns the wire, or
/// that a TCP socket accepts and ignores.
fn against_ip_option(name: c_int) -> Option<Reason> {
    match name {
        libc::IP_TOS
        | libc::IP_TTL
        | libc::IP_MTU_DISCOVER
        | libc::IP_MTU
        | libc::IP_RECVERR
        | libc::IP_RECVTOS
        | libc::IP_RECVTTL
        | libc::IP_RECVOPTS
        | libc::IP_RETOPTS
        | libc::IP_PKTINFO
        | libc::IP_RECVORIGDSTADDR
        | libc::IP_FREEBIND
        | libc::IP_BIND_ADDRESS_NO_PORT => None,
        _ => Some(Reason::SocketOption),
    }
}

fn against_ipv6_option(name: c_int) -> Option<Reason> {
    match name {
        libc::IPV6_TCLASS
        | libc::IPV6_UNICAST_HOPS
        | libc::IPV6_V6ONLY
        | libc::IPV6_MTU_DISCOVER
        | libc::IPV6_RECVERR
        | libc::IPV6_RECVPKTINFO
        | libc::IPV6_RECVTCLASS
        | libc::IPV6_RECVHOPLIMIT
        | libc::IPV6_AUTOFLOWLABEL => None,
        _ => Some(Reason::SocketOption),
    }
}

/// Handles a setsockopt after the kernel has. `is_set`: it has succeeded.
pub(crate) fn after_set(endpoint: &Endpoint, fd: RawFd, level: c_int, name: c_int, is_set: bool) {
    if endpoint.corrections.keepalive.is_needed() && keepalive::concerns(level, name) {
        attach::change_keepalive(endpoint, Keepalive::resume);
    }
    if !is_set {
        return;
    }
    let times = [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW];
    if level == libc::SOL_SOCKET && times.contains(&name) {
        settings::learn_timeouts(endpoint, fd);
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        endpoint.change_low_water(|low_water| low_water.note(kernel::low_water(fd)));
    }
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_INQ) {
        settings::learn_inq(endpoint, fd);
    }
    // With these, TCP notifies its waiters of its state, whether it has changed or not.
    match (level, name) {
        _ if !endpoint.is_attached() => {}
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => epoll::tell_again(endpoint, epoll::IN),
        (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE)
        | (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT) => epoll::tell_again(endpoint, epoll::OUT),
        _ => {}
    }
}

/// Returns the endpoint behind a descriptor that the shim does not know, if an option's value
/// depends on the bytes of lanes. Code past the hooks may have duplicated a known descriptor.
pub(crate) fn behind_unseen_duplicate(fd: RawFd, name: (c_int, c_int)) -> Option<&'static Endpoint> {
    if name != (libc::IPPROTO_TCP, libc::TCP_INFO) || !process::is_home() || untracked::left().is_none() {
        return None;
    }
    let socket = rustix::net::sockopt::socket_cookie(borrow(fd)).ok()?;
    table::known(0, u32::MAX).find_map(|(known, entry)| match entry {
        Entry::Endpoint(name) if rustix::net::sockopt::socket_cookie(borrow(known)) == Ok(socket) => {
            name.resolve()
        }
        _ => None,
    })
}

/// Makes a getsockopt on an endpoint, where a lane has a part in the answer.
///
/// # Safety
/// As getsockopt.
pub(crate) unsafe fn get(
    endpoint: &Endpoint,
    fd: RawFd,
    name: (c_int, c_int),
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's promise, here and below.
    let real = || unsafe { real::getsockopt(fd, name.0, name.1, value, len) };
    match name {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            resets::notice_reset(endpoint, fd);
            let result = real();
            // SAFETY: the kernel has just written so many bytes there.
            unsafe {
                if result == 0 && *len as usize >= size_of::<c_int>() {
                    let value = value.cast::<c_int>();
                    if let Some(errno) = endpoint.tell_owed(|| value.read_unaligned() != 0) {
                        value.write_unaligned(errno);
                    }
                    if value.read_unaligned() == libc::ECONNRESET {
                        resets::reset_is_told(endpoint);
                    }
                }
            }
            result
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            resets::notice_reset(endpoint, fd);
            let result = real();
            if result == 0 {
                // SAFETY: the kernel has just written so many bytes there.
                unsafe { shunt_sys::tcp::add_to_info(value.cast(), *len as usize, beside_kernel(endpoint)) };
            }
            result
        }
        (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) => {
            attach::bar(endpoint, Reason::ZeroCopy);
            match incoming::available(endpoint, fd) {
                0 => real(),
                // SAFETY: the caller's promise.
                waiting => unsafe { nothing_to_map(waiting, value, len) },
            }
        }
        (level, name) => {
            let own = || endpoint.corrections.keepalive.own_value(level, name);
            let before = own();
            let result = real();
            // The connection may have been attached or detached meanwhile.
            if result == 0
                && let Some(own) = before.or_else(own)
            {
                // SAFETY: the kernel has just written so many bytes there.
                unsafe {
                    let count = (*len as usize).min(size_of::<c_int>());
                    value.cast::<u8>().copy_from_nonoverlapping(own.to_ne_bytes().as_ptr(), count);
                }
            }
            result
        }
    }
}

/// Returns the corrections of the kernel's counts: the bytes that have gone over lanes, and those
/// that a reset of the shim's has added or made the kernel forget.
pub(crate) fn beside_kernel(endpoint: &Endpoint) -> LaneBytes {
    let sent = endpoint.tx.lock().tx.lane_total();
    let lanes = LaneBytes { acked: sent, received: incoming::arrived(endpoint), sent, queued: 0 };
    endpoint.corrections.counts.lock().and(lanes)
}

/// Returns whether the program asked how many bytes wait behind those that a call receives
/// (TCP_INQ).
pub(crate) fn tells_waiting(endpoint: &Endpoint, fd: RawFd) -> bool {
    // Other processes that hold the socket set it unseen.
    let is_seen = endpoint.barred().is_none() && endpoint.sharing.holders.are_one();
    if is_seen { endpoint.options.reports_queue() } else { settings::has_inq(fd) }
}

/// Returns how many these are. The kernel counts a FIN too, but not one in whose place TCP would
/// have sent a reset.
pub(crate) fn waiting(endpoint: &Endpoint, fd: RawFd) -> c_int {
    let on_tcp = rustix::io::ioctl_fionread(borrow(fd)).unwrap_or(0) as c_int;
    let finished = !endpoint.is_fin_discounted()
        && shunt_sys::tcp::peer_has_finished(borrow(fd)).unwrap_or(true)
        && !lost::may_be_lost(endpoint, fd);
    on_tcp.saturating_add(incoming::unread(endpoint) as c_int).saturating_add(finished.into())
}

/// Answers TCP_ZEROCOPY_RECEIVE for bytes that a lane still holds, as TCP does when the next bytes
/// fill no page.
///
/// # Safety
/// As getsockopt.
unsafe fn nothing_to_map(waiting: usize, value: *mut c_void, len: *mut socklen_t) -> c_int {
    /// The beginning of `struct tcp_zerocopy_receive`: address, length, recv_skip_hint.
    const HEAD: usize = 16;
    let good =
        memory::is_readable(len.cast(), size_of::<socklen_t>()) && memory::is_writable(value.cast(), HEAD);
    // SAFETY: they can be read and written.
    unsafe {
        if !good || (len.read_unaligned() as usize) < HEAD {
            errno::set(if good { libc::EINVAL } else { libc::EFAULT });
            return -1;
        }
        value.cast::<u32>().add(2).write_unaligned(0);
        value.cast::<u32>().add(3).write_unaligned(waiting as u32);
    }
    0
}

/// Makes an ioctl on an endpoint. Returns the answer, with errno set if it is -1.
///
/// # Safety
/// As ioctl.
pub(crate) unsafe fn ioctl(endpoint: &Endpoint, fd: RawFd, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's promise, here and below.
    let real = || unsafe { real::ioctl(fd, request, argument) };
    match request {
        libc::FIONBIO => {
            let result = real();
            if result == 0 {
                // SAFETY: the kernel has just read an int from there.
                let on = unsafe { argument.cast::<c_int>().read_unaligned() } != 0;
                endpoint.options.set_nonblocking(on);
            }
            result
        }
        libc::FIONREAD => {
            let waiting = incoming::unread(endpoint);
            let result = real();
            if result == 0 {
                // SAFETY: the kernel has just written an int there.
                unsafe {
                    let total = argument.cast::<c_int>().read_unaligned().saturating_add(waiting as c_int);
                    argument.cast::<c_int>().write_unaligned(total);
                }
            }
            result
        }
        // The bytes that the lane still holds precede the mark.
        SIOCATMARK if incoming::available(endpoint, fd) > 0 => {
            // SAFETY: the caller's promise.
            unsafe { answer_int(argument.cast(), 0) }
        }
        // A lane delivers immediately: nothing is queued or unacknowledged. The others do not
        // concern the stream.
        libc::TIOCOUTQ | SIOCOUTQNSD => {
            let result = real();
            let more = endpoint.corrections.counts.lock().queued as c_int;
            if result == 0 && more != 0 {
                // SAFETY: the kernel has just written an int there.
                unsafe {
                    let count: *mut c_int = argument.cast();
                    count.write_unaligned(count.read_unaligned().wrapping_add(more));
                }
            }
            result
        }
        SIOCATMARK | libc::FIOCLEX | libc::FIONCLEX => real(),
        request if INTERFACES.contains(&request) => real(),
        libc::FIOASYNC => {
            // SAFETY: the caller's promise. The kernel fails if it cannot read the argument.
            if unsafe { memory::read(argument.cast::<c_int>()) }.is_some_and(|on| on != 0) {
                attach::bar(endpoint, Reason::AsyncIo);
            }
            real()
        }
        _ => {
            attach::bar(endpoint, Reason::Ioctl);
            real()
        }
    }
}

/// Answers an ioctl with an integer.
///
/// # Safety
/// `to` is the program's argument.
unsafe fn answer_int(to: *mut c_int, value: c_int) -> c_int {
    if !memory::is_writable(to.cast(), size_of::<c_int>()) {
        errno::set(libc::EFAULT);
        return -1;
    }
    // SAFETY: it can be written.
    unsafe { to.write_unaligned(value) };
    0
}

/// Handles an fcntl before the kernel does, if it must not meet a lane.
pub(crate) fn before_fcntl(endpoint: &Endpoint, command: c_int, argument: c_ulong) {
    let asynchronous = command == libc::F_SETFL && argument as c_int & libc::O_ASYNC != 0;
    if asynchronous || matches!(command, libc::F_SETOWN | F_SETOWN_EX | F_SETSIG) {
        attach::bar(endpoint, Reason::AsyncIo);
    }
}

/// Keeps the cached O_NONBLOCK flag up to date, after an fcntl.
pub(crate) fn after_fcntl(endpoint: &Endpoint, command: c_int, argument: c_ulong) {
    if command == libc::F_SETFL {
        endpoint.options.set_nonblocking(argument as c_int & libc::O_NONBLOCK != 0);
    }
}
