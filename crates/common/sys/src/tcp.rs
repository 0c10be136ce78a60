//! Counts the bytes that have passed through a TCP socket, from the kernel's own figures. They
//! include bytes of calls that the shim does not see. See *Offsets* in docs/local-path.md.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use rustix::io::ioctl_fionread;
use rustix::ioctl::{Getter, ioctl};

use crate::{Errno, Result, raw, ready, sockopt};

/// TCP_ESTABLISHED, the only state in which an endpoint may be offered to the broker.
pub const ESTABLISHED: u8 = 1;
/// TCP_LISTEN.
pub const LISTEN: u8 = 10;
/// TCP_CLOSE: not connected yet, or no longer connected.
pub const CLOSE: u8 = 7;

const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const TIME_WAIT: u8 = 6;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;
/// States in which the byte counts of the stream are meaningful.
const CONNECTED: [u8; 7] = [ESTABLISHED, FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING];
/// How often a count is read again before it is given up as unsettled.
const ATTEMPTS: usize = 32;

/// The end that called connect. Its kernel counts the SYN as an acknowledged byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opener {
    /// This end called connect.
    Us,
    /// This end was accepted.
    Peer,
}

/// Returns which end of an established connection called connect. The caller has not seen how the
/// socket was made.
///
/// The kernel counts the SYN of that end as acknowledged, but not as sent. Its count of sent bytes
/// is exact only if it has sent nothing twice. So this returns `None` after a retransmission, and
/// if the counts do not settle. The caller makes sure that no thread sends meanwhile.
pub fn opener(fd: impl AsFd) -> Option<Opener> {
    /// TCPI_OPT_SYN_DATA (linux/tcp.h): bytes of the stream were in the SYN.
    const SYN_DATA: u8 = 32;
    let (info, queued) = info_and_queued(fd.as_fd()).ok()??;
    if info.state != ESTABLISHED || info.bytes_retrans != 0 || info.options & SYN_DATA != 0 {
        return None;
    }
    let in_flight = queued.checked_sub(u64::from(info.notsent_bytes))?;
    match (info.bytes_acked + in_flight).checked_sub(info.bytes_sent) {
        Some(0) => Some(Opener::Peer),
        Some(1) => Some(Opener::Us),
        _ => None,
    }
}

/// Returns the number of bytes that the program has written to this socket. Returns `None` if the
/// counts do not settle or the socket is no longer connected. The direction must then stay on TCP.
///
/// The result is exact while no other thread is inside a send on the socket. The bytes of a
/// concurrent send are counted, or make the result `None`.
pub fn sent(fd: impl AsFd, opener: Opener) -> Result<Option<u64>> {
    let count = acknowledged_and_queued(fd.as_fd())?;
    Ok(count.and_then(|count| count.checked_sub(u64::from(opener == Opener::Us))))
}

/// Returns the position in the stream of the byte that a send would send next. The origin is unknown,
/// but all positions of a connection have it in common. Returns `None` if the connection is over.
/// Fails with EAGAIN if the counts do not settle.
pub fn position(fd: impl AsFd) -> Result<Option<u64>> {
    let (info, queued) = info_and_queued(fd.as_fd())?.ok_or(Errno::AGAIN)?;
    Ok(position_of(&info, queued))
}

/// Returns the number of bytes that the program has read from this socket.
///
/// Fails with ECONNRESET if the socket is closed with an error: the kernel then no longer reports
/// whether its count includes a FIN. Fails with EAGAIN if bytes arrived during every attempt. A
/// receiver that must avoid both errors takes one reading while the socket is established, and adds
/// to it from then on.
pub fn read(fd: impl AsFd) -> Result<u64> {
    let fd = fd.as_fd();
    for _ in 0..ATTEMPTS {
        let before = info(fd)?;
        let unread = ioctl_fionread(fd)?;
        let after = info(fd)?;
        if (before.bytes_received, before.state) != (after.bytes_received, after.state) {
            continue;
        }
        let fin = match after.state {
            CLOSE_WAIT | LAST_ACK | CLOSING | TIME_WAIT => 1,
            // The connection is over. Without a pending error, both FINs were exchanged.
            CLOSE if after.bytes_received == 0 => 0,
            CLOSE if polled(fd, PollFlags::ERR)? => return Err(Errno::CONNRESET),
            CLOSE => 1,
            _ => 0,
        };
        return after.bytes_received.checked_sub(unread + fin).ok_or(Errno::CONNRESET);
    }
    Err(Errno::AGAIN)
}

/// Returns the number of bytes that the socket has received, read or not. A received FIN counts as
/// one.
pub fn received(fd: impl AsFd) -> Result<u64> {
    info(fd.as_fd()).map(|info| info.bytes_received)
}

/// Returns how many segments with data the socket has received, modulo 2^32, and how many bytes a
/// segment can carry.
pub fn segments(fd: impl AsFd) -> Result<(u32, u32)> {
    info(fd.as_fd()).map(|info| (info.data_segments_in, info.advertised_mss))
}

/// Returns the count of [`read`] for a socket with urgent data. The kernel does not count bytes
/// behind the urgent byte as unread unless SO_OOBINLINE is set, so it is set for the moment. No
/// other thread may receive in the meantime.
pub fn read_beside_urgent(fd: impl AsFd) -> Result<u64> {
    let fd = fd.as_fd();
    let was_inline = rustix::net::sockopt::socket_oobinline(fd)?;
    rustix::net::sockopt::set_socket_oobinline(fd, true)?;
    let count = read(fd);
    rustix::net::sockopt::set_socket_oobinline(fd, was_inline)?;
    count
}

/// Returns `true` if the peer has sent its FIN, or the connection has been reset or is over.
pub fn hung_up(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    // A descriptor that cannot be polled is not a connection either. poll also reports RDHUP after
    // this end has shut down its own direction, so the state decides.
    let goes_on = || state(fd).is_ok_and(|state| [ESTABLISHED, FIN_WAIT1, FIN_WAIT2].contains(&state));
    polled(fd, PollFlags::RDHUP).unwrap_or(true) && !goes_on()
}

/// Returns whether the peer's FIN has arrived, even if the connection was reset afterwards. Returns
/// `None` if the connection is over and has unread bytes, because the kernel does not report it
/// then.
pub fn peer_has_finished(fd: impl AsFd) -> Option<bool> {
    let fd = fd.as_fd();
    match state(fd).ok()? {
        CLOSE => {}
        state => return Some([CLOSE_WAIT, LAST_ACK, CLOSING, TIME_WAIT].contains(&state)),
    }
    // The request names no address, so the kernel maps nothing. It fails with EIO if no byte is
    // unread and the peer's FIN has arrived.
    match sockopt::read::<Zerocopy>(fd, libc::IPPROTO_TCP, libc::TCP_ZEROCOPY_RECEIVE) {
        Err(Errno::IO) => Some(true),
        Ok((asked, _)) if asked.unread == 0 => Some(false),
        _ => None,
    }
}

/// Returns `true` if neither direction has been shut down, by any process.
pub fn is_whole(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    state(fd) == Ok(ESTABLISHED) && !polled(fd, PollFlags::RDHUP).unwrap_or(true)
}

/// Returns whether this end has sent a FIN, or the connection is over.
pub fn has_sent_fin(fd: impl AsFd) -> bool {
    state(fd).map_or(true, |state| ![ESTABLISHED, CLOSE_WAIT].contains(&state))
}

/// Returns `true` if unread bytes have been received. Closing the socket would then reset the
/// connection.
pub fn has_unread(fd: impl AsFd) -> bool {
    rustix::io::ioctl_fionread(fd).is_ok_and(|count| count > 0)
}

/// Returns the socket's TCP state.
pub fn state(fd: impl AsFd) -> Result<u8> {
    sockopt::read::<Info>(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO).map(|(info, _)| info.state)
}

/// Returns the number of bytes acknowledged and queued, including the opener's SYN.
///
/// It derives from sequence numbers and is exact. The kernel's count of bytes sent is only a
/// statistic: it stays wrong after the host itself has dropped an outgoing segment.
fn acknowledged_and_queued(fd: BorrowedFd<'_>) -> Result<Option<u64>> {
    Ok(info_and_queued(fd)?.and_then(|(info, queued)| position_of(&info, queued)))
}

/// Returns how many bytes the kernel counts as written, or `None` if the socket is not connected.
fn position_of(info: &Info, queued: u64) -> Option<u64> {
    if !CONNECTED.contains(&info.state) {
        return None;
    }
    let fin = u64::from(![ESTABLISHED, CLOSE_WAIT].contains(&info.state));
    (info.bytes_acked + queued).checked_sub(fin)
}

/// Returns the counts of a socket and the length of its send queue at one time. Returns `None` if
/// they do not settle.
fn info_and_queued(fd: BorrowedFd<'_>) -> Result<Option<(Info, u64)>> {
    for _ in 0..ATTEMPTS {
        let before = info(fd)?;
        let queued = outq(fd)?;
        let after = info(fd)?;
        // The queue length counts from the first unacknowledged byte. It fits the count of
        // acknowledged bytes only if that did not change in between.
        if before.progress() == after.progress() {
            return Ok(Some((after, queued)));
        }
    }
    Ok(None)
}

/// The head of `struct tcp_info` (linux/tcp.h), which only ever grows at its end.
#[derive(Clone, Copy)]
#[repr(C)]
struct Info {
    state: u8,
    _bytes: [u8; 4],
    options: u8,
    _scales: [u8; 2],
    _words: [u32; 19],
    advertised_mss: u32,
    _more_words: [u32; 4],
    _pacing: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
    _segments: [u32; 2],
    notsent_bytes: u32,
    _least_rtt: u32,
    data_segments_in: u32,
    _data_segments_out: u32,
    _times: [u64; 4],
    _delivered: [u32; 2],
    bytes_sent: u64,
    bytes_retrans: u64,
}

const _: () = assert!(std::mem::offset_of!(Info, options) == 5);
const _: () = assert!(std::mem::offset_of!(Info, bytes_acked) == 120);
const _: () = assert!(std::mem::offset_of!(Info, advertised_mss) == 84);
const _: () = assert!(std::mem::offset_of!(Info, notsent_bytes) == 144);
const _: () = assert!(std::mem::offset_of!(Info, data_segments_in) == 152);
const _: () = assert!(std::mem::offset_of!(Info, bytes_sent) == 200);

// SAFETY: integers without padding.
unsafe impl sockopt::Plain for Info {}

impl Info {
    fn progress(&self) -> [u64; 5] {
        let state = u64::from(self.state);
        [self.bytes_acked, self.bytes_sent, self.bytes_retrans, u64::from(self.notsent_bytes), state]
    }
}

/// The head of `struct tcp_zerocopy_receive` (linux/tcp.h).
#[derive(Clone, Copy)]
#[repr(C)]
struct Zerocopy {
    _address: u64,
    _length: u32,
    unread: u32,
}

// SAFETY: integers without padding.
unsafe impl sockopt::Plain for Zerocopy {}

/// The head of the kernel's array of SK_MEMINFO_* values.
#[derive(Clone, Copy)]
#[repr(C)]
struct Memory {
    _receiving: [u32; 3],
    send_buffer: u32,
    _ahead: u32,
    queued: u32,
}

// SAFETY: integers without padding.
unsafe impl sockopt::Plain for Memory {}

/// Corrections to the kernel's counts of a connection. They are modulo 2^64 and may be negative.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneBytes {
    /// Added to the bytes that the peer has acknowledged.
    pub acked: u64,
    /// Added to the bytes that were received.
    pub received: u64,
    /// Added to the bytes that were sent.
    pub sent: u64,
    /// Added to the bytes that wait to be sent, or to be acknowledged.
    pub queued: u64,
}

impl LaneBytes {
    /// Returns the sum of both corrections.
    pub fn and(self, more: LaneBytes) -> LaneBytes {
        LaneBytes {
            acked: self.acked.wrapping_add(more.acked),
            received: self.received.wrapping_add(more.received),
            sent: self.sent.wrapping_add(more.sent),
            queued: self.queued.wrapping_add(more.queued),
        }
    }

    /// Returns the correction that makes `after` as large as `before`.
    pub fn between(after: LaneBytes, before: LaneBytes) -> LaneBytes {
        LaneBytes {
            acked: before.acked.wrapping_sub(after.acked),
            received: before.received.wrapping_sub(after.received),
            sent: before.sent.wrapping_sub(after.sent),
            queued: before.queued.wrapping_sub(after.queued),
        }
    }
}

/// Returns the kernel's counts of a connection. Bytes that were sent twice count once.
pub fn counts(fd: BorrowedFd<'_>) -> Result<LaneBytes> {
    let info = info(fd)?;
    Ok(LaneBytes {
        acked: info.bytes_acked,
        received: info.bytes_received,
        sent: info.bytes_sent.wrapping_sub(info.bytes_retrans),
        queued: outq(fd)?,
    })
}

/// Adds the bytes that did not pass through TCP to a `struct tcp_info` of which the kernel has
/// filled `len` bytes.
///
/// # Safety
/// `len` bytes at `info` must be writable.
pub unsafe fn add_to_info(info: *mut u8, len: usize, beside: LaneBytes) {
    let counts = [
        (std::mem::offset_of!(Info, bytes_acked), beside.acked),
        (std::mem::offset_of!(Info, bytes_received), beside.received),
        (std::mem::offset_of!(Info, bytes_sent), beside.sent),
    ];
    for (offset, more) in counts {
        if offset + size_of::<u64>() <= len {
            let count = info.wrapping_add(offset).cast::<u64>();
            // SAFETY: within the bytes that the caller guarantees.
            unsafe { count.write_unaligned(count.read_unaligned().wrapping_add(more)) };
        }
    }
    let offset = std::mem::offset_of!(Info, notsent_bytes);
    if beside.queued != 0 && offset + size_of::<u32>() <= len {
        let count = info.wrapping_add(offset).cast::<u32>();
        // SAFETY: as above.
        unsafe { count.write_unaligned(count.read_unaligned().wrapping_add(beside.queued as u32)) };
    }
}

fn info(fd: BorrowedFd<'_>) -> Result<Info> {
    let (info, len) = sockopt::read::<Info>(fd, libc::IPPROTO_TCP, libc::TCP_INFO)?;
    // Linux before 4.19 does not report bytes sent.
    if len < size_of::<Info>() { Err(Errno::OPNOTSUPP) } else { Ok(info) }
}

/// Returns the number of bytes written and not acknowledged, including the FIN (SIOCOUTQ).
pub fn outq(fd: BorrowedFd<'_>) -> Result<u64> {
    // SAFETY: SIOCOUTQ (TIOCOUTQ) writes one int.
    let bytes = unsafe { ioctl(fd, Getter::<{ libc::TIOCOUTQ as u32 }, i32>::new())? };
    Ok(bytes.max(0) as u64)
}

/// Returns `Some(true)` if the peer's kernel has acknowledged everything that was written, and
/// `Some(false)` if it never will. Returns `None` while an acknowledgement may still come.
pub fn is_acknowledged(fd: impl AsFd) -> Result<Option<bool>> {
    let fd = fd.as_fd();
    // After a reset, unacknowledged bytes stay in the count.
    let state = state(fd)?;
    match outq(fd)? {
        0 => Ok(Some(true)),
        _ => Ok(if [ESTABLISHED, CLOSE_WAIT].contains(&state) { None } else { Some(false) }),
    }
}

/// Resets the connection, also if other descriptors of the socket are open.
pub fn abort(fd: impl AsFd) -> Result<()> {
    rustix::net::connect_unspec(fd)
}

/// Makes the socket drop all arriving segments, or accept them again. TCP does not see a dropped
/// segment, so it is not acknowledged. Segments that the kernel is processing at this moment may
/// still arrive; see [`await_arrivals`].
pub fn set_deaf(fd: impl AsFd, is_deaf: bool) -> Result<()> {
    if !is_deaf {
        return sockopt::write(fd.as_fd(), libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0u32);
    }
    let nothing = [libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 }];
    sockopt::write_filter(fd.as_fd(), &nothing)
}

/// Waits until the kernel has finished every segment whose processing had begun before. This can
/// take some tens of milliseconds.
pub fn await_arrivals() -> Result<()> {
    const MEMBARRIER_CMD_GLOBAL: usize = 1;
    // SAFETY: the call takes no pointer. It waits until every processor has left the RCU read-side
    // section in which it processes a packet.
    unsafe { raw::call(libc::SYS_membarrier, [MEMBARRIER_CMD_GLOBAL, 0, 0, 0, 0, 0]).map(drop) }
}

/// Returns the free part of the send buffer, in bytes of kernel memory. One byte of data may take
/// several of them.
pub fn send_room(fd: BorrowedFd<'_>) -> Result<u32> {
    let (memory, _) = sockopt::read::<Memory>(fd, libc::SOL_SOCKET, libc::SO_MEMINFO)?;
    Ok(memory.send_buffer.saturating_sub(memory.queued))
}

/// Returns `true` if poll reports `events`. If `events` contains RDHUP, errors and hang-ups count
/// too.
fn polled(fd: BorrowedFd<'_>, events: PollFlags) -> Result<bool> {
    let answer = ready::now(fd, events)?;
    let over = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    Ok(answer.intersects(if events.contains(PollFlags::RDHUP) { over } else { events }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::SockRef;
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
    use std::time::Duration;

    /// Returns both ends of a loopback connection, the opener first.
    fn loopback() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let opener = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (opener, listener.accept().unwrap().0)
    }

    /// Returns a pair for each role: writer, reader, and the opener as the writer sees it.
    fn both_ways() -> Vec<(TcpStream, TcpStream, Opener)> {
        let (opener, acceptor) = loopback();
        let (opener2, acceptor2) = loopback();
        vec![(opener, acceptor, Opener::Us), (acceptor2, opener2, Opener::Peer)]
    }

    fn settle() {
        std::thread::sleep(Duration::from_millis(20));
    }

    #[track_caller]
    fn expect(writer: &TcpStream, opener: Opener, reader: &TcpStream, written: u64, taken: u64) {
        assert_eq!(sent(writer, opener), Ok(Some(written)), "sent");
        assert_eq!(read(reader), Ok(taken), "read");
    }

    #[test]
    fn what_a_send_takes_without_waiting_has_room() {
        let (mut writer, _unread) = loopback();
        SockRef::from(&writer).set_send_buffer_size(100_000).unwrap();
        writer.set_nonblocking(true).unwrap();
        assert_eq!(send_room(writer.as_fd()), Ok(200_000));
        let taken = writer.write(&[0; 20_000]).unwrap();
        assert_eq!(taken, 20_000);
        while writer.write(&[0; 20_000]).is_ok() {}
        assert!(send_room(writer.as_fd()).unwrap() < 20_000);
    }

    #[test]
    fn the_opener_is_known_at_any_time_of_an_established_connection() {
        for (mut writer, mut reader, role) in both_ways() {
            let other = if role == Opener::Us { Opener::Peer } else { Opener::Us };
            let check = |writer: &TcpStream, reader: &TcpStream| {
                assert_eq!((opener(writer), opener(reader)), (Some(role), Some(other)));
            };
            check(&writer, &reader);
            for round in 1..100usize {
                writer.write_all(&vec![1; round * 7]).unwrap();
                check(&writer, &reader);
                reader.read_exact(&mut vec![0; round * 5]).unwrap();
                check(&writer, &reader);
            }
            // Bytes that wait for room are not sent yet.
            writer.set_nonblocking(true).unwrap();
            while writer.write(&[1; 50_000]).is_ok() {}
            check(&writer, &reader);
            writer.shutdown(Shutdown::Write).unwrap();
            assert_eq!(opener(&writer), None);
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert_eq!(opener(&listener), None);
    }

    #[test]
    fn counts_are_exact_from_the_first_byte() {
        for (mut writer, mut reader, opener) in both_ways() {
            expect(&writer, opener, &reader, 0, 0);
            let (mut written, mut taken) = (0, 0);
            for round in 1..200usize {
                writer.write_all(&vec![1; round * 7]).unwrap();
                written += round as u64 * 7;
                // Read without a pause: no count may depend on acknowledgements having arrived.
                assert_eq!(sent(&writer, opener), Ok(Some(written)));
                let mut buffer = vec![0; round * 5];
                reader.read_exact(&mut buffer).unwrap();
                taken += round as u64 * 5;
                assert_eq!(read(&reader), Ok(taken));
            }
            settle();
            expect(&writer, opener, &reader, written, taken);
            expect(&reader, if opener == Opener::Us { Opener::Peer } else { Opener::Us }, &writer, 0, 0);
        }
    }

    #[test]
    fn counts_are_exact_with_a_full_window_and_large_transfers() {
        for (mut writer, mut reader, opener) in both_ways() {
            writer.set_nonblocking(true).unwrap();
            let (mut written, mut taken) = (0u64, 0u64);
            for _ in 0..20 {
                while let Ok(count) = writer.write(&[2; 50_000]) {
                    written += count as u64;
                }
                expect(&writer, opener, &reader, written, taken);
                settle();
                expect(&writer, opener, &reader, written, taken);
                let mut buffer = vec![0; 300_001];
                reader.read_exact(&mut buffer).unwrap();
                taken += buffer.len() as u64;
                assert_eq!(read(&reader), Ok(taken));
            }
            assert!(written > 1 << 20);
        }
    }

    #[test]
    fn segments_are_counted() {
        let (mut writer, mut reader) = loopback();
        for count in 0..10 {
            let (segments, most) = segments(&reader).unwrap();
            assert_eq!(segments, count);
            assert!(most > 500, "{most}");
            writer.write_all(&[1]).unwrap();
            reader.read_exact(&mut [0]).unwrap();
        }
    }

    #[test]
    fn a_deaf_socket_acknowledges_nothing_until_it_hears_again() {
        for is_reset in [false, true] {
            let (mut writer, reader) = loopback();
            writer.write_all(b"before").unwrap();
            settle();
            assert_eq!(is_acknowledged(&writer), Ok(Some(true)));
            set_deaf(&reader, true).unwrap();
            await_arrivals().unwrap();
            writer.write_all(b"after").unwrap();
            settle();
            assert_eq!(is_acknowledged(&writer), Ok(None));
            assert_eq!(ioctl_fionread(&reader), Ok(6));
            if is_reset {
                SockRef::from(&reader).set_linger(Some(Duration::ZERO)).unwrap();
                drop(reader);
                settle();
                assert_eq!(is_acknowledged(&writer), Ok(Some(false)));
                continue;
            }
            set_deaf(&reader, false).unwrap();
            while is_acknowledged(&writer) == Ok(None) {
                settle();
            }
            assert_eq!((is_acknowledged(&writer), ioctl_fionread(&reader)), (Ok(Some(true)), Ok(11)));
        }
    }

    #[test]
    fn fins_are_not_bytes() {
        for (mut writer, mut reader, opener) in both_ways() {
            let other = if opener == Opener::Us { Opener::Peer } else { Opener::Us };
            writer.write_all(&[3; 100]).unwrap();
            reader.write_all(&[4; 50]).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
            settle();
            expect(&writer, opener, &reader, 100, 0);
            assert!(hung_up(&reader) && !hung_up(&writer));
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            expect(&writer, opener, &reader, 100, 100);
            reader.write_all(&[4; 5]).unwrap();
            settle();
            expect(&reader, other, &writer, 55, 0);
            reader.shutdown(Shutdown::Write).unwrap();
            settle();
            // Both FINs are exchanged. One end is in CLOSE or TIME_WAIT, with data still to be
            // read.
            assert_eq!(read(&writer), Ok(0));
            writer.read_exact(&mut [0; 10]).unwrap();
            assert_eq!(read(&writer), Ok(10));
            writer.read_to_end(&mut all).unwrap();
            assert_eq!(read(&writer), Ok(55));
            assert_eq!(read(&reader), Ok(100));
        }
    }

    #[test]
    fn a_fin_is_known_of_also_after_a_reset() {
        for finishes in [false, true] {
            let (mut this, peer) = loopback();
            assert_eq!(peer_has_finished(&this), Some(false));
            if finishes {
                peer.shutdown(Shutdown::Write).unwrap();
                settle();
                assert_eq!(peer_has_finished(&this), Some(true));
            }
            // This byte is unread when the peer closes, which causes a reset.
            this.write_all(&[1]).unwrap();
            settle();
            drop(peer);
            settle();
            assert_eq!((state(&this), peer_has_finished(&this)), (Ok(CLOSE), Some(finishes)));
            // The pending error must still be reported to the program, exactly once.
            assert!(this.take_error().unwrap().is_some() && this.take_error().unwrap().is_none());
            assert_eq!(peer_has_finished(&this), Some(finishes));
        }
        let (this, mut peer) = loopback();
        (&this).write_all(&[1]).unwrap();
        peer.write_all(&[2]).unwrap();
        settle();
        drop(peer);
        settle();
        assert_eq!((state(&this), peer_has_finished(&this)), (Ok(CLOSE), None));
    }

    #[test]
    fn a_fin_behind_a_full_window_is_not_a_byte() {
        for (mut writer, mut reader, opener) in both_ways() {
            writer.set_nonblocking(true).unwrap();
            let mut written = 0u64;
            while let Ok(count) = writer.write(&[5; 65_536]) {
                written += count as u64;
            }
            settle();
            writer.shutdown(Shutdown::Write).unwrap();
            expect(&writer, opener, &reader, written, 0);
            let mut rest = Vec::new();
            reader.read_to_end(&mut rest).unwrap();
            expect(&writer, opener, &reader, written, written);
            assert_eq!(rest.len() as u64, written);
        }
    }

    #[test]
    fn small_buffers_and_concurrent_readers_do_not_disturb() {
        for (mut writer, mut reader, opener) in both_ways() {
            SockRef::from(&writer).set_send_buffer_size(4096).unwrap();
            SockRef::from(&reader).set_recv_buffer_size(4096).unwrap();
            let mut copy = reader.try_clone().unwrap();
            let thread = std::thread::spawn(move || {
                let mut buffer = vec![0; 1013];
                let mut total = 0u64;
                while let Ok(count @ 1..) = copy.read(&mut buffer) {
                    total += count as u64;
                    assert_eq!(read(&copy), Ok(total));
                }
                total
            });
            let mut written = 0u64;
            for round in 1..150usize {
                writer.write_all(&vec![6; round * 19]).unwrap();
                written += round as u64 * 19;
                // `None` is allowed while acknowledgements arrive. A wrong count is not.
                assert!(sent(&writer, opener).unwrap().is_none_or(|count| count == written));
            }
            writer.shutdown(Shutdown::Write).unwrap();
            assert_eq!(thread.join().unwrap(), written);
            assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
            assert_eq!(read(&reader), Ok(written));
        }
    }

    #[test]
    fn a_reset_connection_has_no_count() {
        let (mut opener, acceptor) = loopback();
        assert!(!hung_up(&opener));
        opener.write_all(&[7; 10]).unwrap();
        settle();
        drop(acceptor);
        settle();
        assert_eq!(sent(&opener, Opener::Us), Ok(None));
        assert!(hung_up(&opener));
        let (mut opener, acceptor) = loopback();
        opener.write_all(&[7; 10]).unwrap();
        settle();
        SockRef::from(&opener).set_linger(Some(Duration::ZERO)).unwrap();
        drop(opener);
        settle();
        assert_eq!(read(&acceptor), Err(Errno::CONNRESET));
    }

    #[test]
    fn what_is_no_tcp_socket_is_an_error() {
        let pipe = std::io::pipe().unwrap().0;
        assert_eq!(sent(&pipe, Opener::Us), Err(Errno::NOTSOCK));
        assert_eq!(read(&pipe), Err(Errno::NOTSOCK));
    }
}
