//! select and pselect, by way of poll if one of the descriptors is a connection.
//! `ops/select_step.rs` decides what such a call does next, and [`Call`] does it.

use std::ffi::c_int;

use libc::{fd_set, pollfd, sigset_t};
use shunt_sys::memory;

use crate::base::names::EndpointRef;
use crate::base::signal::{self, Ran};
use crate::base::table::{self, WORD as BITS};
use crate::base::{errno, kernel, own_table, process};
use crate::ops::poll;
use crate::ops::select_step::{self, Found, Step};
use crate::socket::endpoint::{self, Endpoint};

/// The three bitmaps of a call, as words.
pub(crate) struct Sets {
    sets: [*mut u64; 3],
    count: usize,
}

const ASKED: [i16; 3] = [libc::POLLIN | libc::POLLRDNORM, libc::POLLOUT | libc::POLLWRNORM, libc::POLLPRI];
/// The events that the kernel's select counts as readable, writable and exceptional.
const MEANS: [i16; 3] = [
    libc::POLLIN | libc::POLLRDNORM | libc::POLLHUP | libc::POLLERR,
    libc::POLLOUT | libc::POLLWRNORM | libc::POLLERR,
    libc::POLLPRI,
];

/// How often descriptors are checked that poll cannot wait for.
const HUNG_UP_NANOS: u64 = 10_000_000;

/// The events of a closed fd, which is reported in every bitmap that has it.
const CLOSED: i16 = MEANS[0] | MEANS[1] | MEANS[2];

impl Sets {
    pub(crate) fn new(count: c_int, sets: [*mut fd_set; 3]) -> Sets {
        Sets { sets: sets.map(|set| set.cast()), count: count.max(0) as usize }
    }

    /// Returns whether one of the descriptors may be a connected TCP socket or an epoll instance, and
    /// the kernel would accept the addresses.
    pub(crate) fn may_concern_us(&mut self) -> bool {
        let known = 0..self.words().min(table::PLACES / BITS);
        if !known.into_iter().any(|index| table::pollable(index) & self.any(index) != 0) {
            return false;
        }
        // The kernel reads the bitmaps no further than its table of descriptors goes, however many
        // there are said to be.
        if !self.are_good()
            && let Some(fewer) = own_table::shorter_than(self.count as c_int)
        {
            self.count = fewer as usize;
        }
        self.are_good()
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns whether the program has given this bitmap.
    pub(super) fn is_given(&self, set: usize) -> bool {
        !self.sets[set].is_null()
    }

    pub(super) fn words(&self) -> usize {
        self.count.div_ceil(BITS)
    }

    fn are_good(&self) -> bool {
        let len = self.words() * BITS / 8;
        self.sets.iter().all(|set| set.is_null() || memory::is_readable(set.cast(), len))
    }

    /// Returns a word of a bitmap, which the kernel copies as a whole. A bitmap that cannot be read
    /// is empty. So is an absent one, without an attempt to read it: that would take a system call
    /// for each descriptor.
    #[inline(always)]
    pub(super) fn word(&self, set: usize, index: usize) -> u64 {
        if self.sets[set].is_null() {
            return 0;
        }
        // SAFETY: the program's set; it is a plain number.
        unsafe { memory::read(self.sets[set].wrapping_add(index)) }.unwrap_or(0)
    }

    /// Returns the descriptors of all three bitmaps in a word.
    pub(super) fn any(&self, index: usize) -> u64 {
        self.word(0, index) | self.word(1, index) | self.word(2, index)
    }

    pub(super) fn members(&self) -> Members<'_> {
        Members { sets: self, next: 0, bits: [0; 3], any: 0 }
    }

    /// Returns a word of each bitmap, without the descriptors that the call does not have.
    pub(super) fn words_at(&self, index: usize) -> [u64; 3] {
        let beyond = ((index + 1) * BITS).saturating_sub(self.count);
        let mask = u64::MAX >> beyond;
        [self.word(0, index) & mask, self.word(1, index) & mask, self.word(2, index) & mask]
    }

    /// Waits as select does, with poll. Returns `None` if the kernel's own select is enough, because
    /// none of the descriptors is a connected TCP socket or shows lanes.
    pub(crate) fn wait(&self, timeout: Option<u64>, mask: *const sigset_t) -> Option<c_int> {
        poll::concerns(self.members().map(|(fd, _)| fd)).then(|| self.wait_by_poll(timeout, mask))
    }

    fn wait_by_poll(&self, timeout: Option<u64>, mask: *const sigset_t) -> c_int {
        let count = (0..self.words()).map(|index| self.any(index).count_ones() as usize).sum();
        let (mut fds, mut connections) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (fd, events) in self.members() {
            fds.push(pollfd { fd, events, revents: 0 });
            connections.extend(named(fd).map(|name| (fd, name)));
        }
        let deadline = timeout.map(|nanos| process::now().saturating_add(nanos));
        let (hung_up, last) = (Vec::new(), Last::default());
        Call { sets: self, fds, hung_up, connections, deadline, mask, last }.run()
    }

    /// Returns in which of the bitmaps an entry is to be reported, as bits.
    fn means(&self, entry: &pollfd) -> usize {
        // Most entries have no events.
        if entry.revents == 0 {
            return 0;
        }
        let Ok(fd) = usize::try_from(entry.fd) else { return 0 };
        (0..3)
            .filter(|&set| {
                self.word(set, fd / BITS) & 1 << (fd % BITS) != 0 && entry.revents & MEANS[set] != 0
            })
            .fold(0, |all, set| all | 1 << set)
    }

    fn store(&self, fds: &[pollfd]) -> c_int {
        let words = self.words();
        let mut total = 0;
        for set in (0..3).filter(|&set| self.is_given(set)) {
            let mut result = vec![0u64; words];
            for entry in fds.iter().filter(|entry| self.means(entry) & 1 << set != 0) {
                result[entry.fd as usize / BITS] |= 1 << (entry.fd as usize % BITS);
                total += 1;
            }
            if !self.store_words(set, &result) {
                return -1;
            }
        }
        total
    }

    /// Stores the words of a bitmap that the program has given. Returns `false`, with errno, if it
    /// cannot be written.
    pub(super) fn store_words(&self, set: usize, words: &[u64]) -> bool {
        for (index, word) in words.iter().enumerate() {
            // SAFETY: the program wants it there.
            if !unsafe { memory::write(self.sets[set].wrapping_add(index), *word) } {
                errno::set(libc::EFAULT);
                return false;
            }
        }
        true
    }
}

/// The descriptors of a call, with the events that poll is to report for each.
pub(super) struct Members<'a> {
    sets: &'a Sets,
    /// The next word.
    next: usize,
    /// The word before it, of each bitmap.
    bits: [u64; 3],
    /// The descriptors in it that are still to come.
    any: u64,
}

impl Iterator for Members<'_> {
    type Item = (c_int, i16);

    #[inline]
    fn next(&mut self) -> Option<(c_int, i16)> {
        while self.any == 0 {
            if self.next >= self.sets.words() {
                return None;
            }
            self.bits = self.sets.words_at(self.next);
            self.any = self.bits[0] | self.bits[1] | self.bits[2];
            self.next += 1;
        }
        let bit = self.any.trailing_zeros() as usize;
        self.any &= self.any - 1;
        // All ones if the bit is set, without a branch.
        let asked = |set: usize| ((self.bits[set] >> bit & 1) as i16).wrapping_neg() & ASKED[set];
        let events = asked(0) | asked(1) | asked(2);
        Some((((self.next - 1) * BITS + bit) as c_int, events))
    }
}

/// A select by way of poll.
struct Call<'a> {
    sets: &'a Sets,
    fds: Vec<pollfd>,
    /// The descriptors that have hung up. poll reports that even if it was not requested, and would
    /// return immediately the next time; select does not report it. Such a descriptor can then only
    /// have urgent data.
    hung_up: Vec<pollfd>,
    /// What the descriptors named when the call began, in the order of the descriptors.
    connections: Vec<(c_int, EndpointRef)>,
    deadline: Option<u64>,
    mask: *const sigset_t,
    last: Last,
}

/// The last poll.
#[derive(Default)]
struct Last {
    result: c_int,
    had_all_time: bool,
}

impl Call<'_> {
    fn run(mut self) -> c_int {
        let mut step = Step::Poll;
        loop {
            let found = match step {
                Step::Poll => self.poll(),
                Step::MarkClosed => Found::Marked { has_bad: self.mark_closed() },
                Step::CheckHungUp => self.check_hung_up(),
                Step::NoticeHandlers => {
                    // A deferred handler may be waiting for this call to end.
                    let have_run = signal::has_deferred() || signal::take_ran() != Ran::Nothing;
                    Found::Handlers { have_run }
                }
                Step::SetAside => self.set_aside(),
                Step::Store => return self.sets.store(&self.fds),
                Step::Fail => return self.last.result,
                Step::BadDescriptor => {
                    errno::set(libc::EBADF);
                    return -1;
                }
                Step::Interrupted => {
                    errno::set(libc::EINTR);
                    return -1;
                }
            };
            step = select_step::next(found);
        }
    }

    fn poll(&mut self) -> Found {
        let Call { ref mut fds, ref hung_up, deadline, mask, .. } = *self;
        let entries = fds.as_mut_ptr();
        let count = fds.len();
        let left = deadline.map(|deadline| deadline.saturating_sub(process::now()));
        let until_look = (!hung_up.is_empty()).then_some(HUNG_UP_NANOS);
        let nanos = left.into_iter().chain(until_look).min();
        let result = poll::prepare_and_poll(fds, nanos, mask, || {
            let timeout = nanos.map(crate::ops::sleep::as_timespec);
            let pointer = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: the array is ours; the callee fills it in while `poll` does not touch it.
            unsafe { crate::base::real::ppoll(entries, count as u64, pointer, mask) }
        });
        self.last = Last { result, had_all_time: left == nanos };
        Found::Polled { has_failed: result < 0 }
    }

    /// Marks closed descriptors as ready in all bitmaps. The kernel checks for bad ones only once,
    /// at the beginning. Returns whether there is one that was closed already then.
    fn mark_closed(&mut self) -> bool {
        let Call { ref mut fds, ref connections, .. } = *self;
        for entry in fds.iter_mut().filter(|entry| entry.revents & libc::POLLNVAL != 0) {
            if named_at_first(connections, entry.fd).is_none() {
                return true;
            }
            entry.revents = CLOSED;
        }
        false
    }

    /// Polls the descriptors that have hung up, with no others, and adds them to the others.
    fn check_hung_up(&mut self) -> Found {
        let Call { sets, ref mut fds, ref mut hung_up, ref connections, ref last, .. } = *self;
        // A file that has got the fd since does not concern this call. The kernel, too, polls it
        // only after the first file has woken the call.
        hung_up.retain(|entry| named(entry.fd) == named_at_first(connections, entry.fd));
        kernel::poll_now(hung_up);
        fds.append(hung_up);
        let has_ready = fds.iter().any(|entry| sets.means(entry) != 0);
        Found::Checked { has_ready, is_empty: last.result == 0, had_all_time: last.had_all_time }
    }

    /// Keeps the descriptors from the next poll that have events, none of which is in a bitmap.
    fn set_aside(&mut self) -> Found {
        let Call { ref mut fds, ref mut hung_up, .. } = *self;
        fds.retain(|entry| {
            let has_hung_up = entry.revents != 0;
            if has_hung_up {
                hung_up.push(*entry);
            }
            !has_hung_up
        });
        Found::SetAside
    }
}

fn named(fd: c_int) -> Option<EndpointRef> {
    endpoint::behind(fd).map(Endpoint::reference)
}

/// Returns what a descriptor named when the call began.
fn named_at_first(connections: &[(c_int, EndpointRef)], fd: c_int) -> Option<EndpointRef> {
    let place = connections.binary_search_by_key(&fd, |one| one.0).ok()?;
    Some(connections[place].1)
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::ptr::null_mut;
    use std::time::Duration;

    use super::*;

    /// Returns the system time of this thread.
    fn system_time() -> Duration {
        // SAFETY: plain numbers, of which zero is one.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: it is as large as it must be.
        assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) }, 0);
        Duration::new(usage.ru_stime.tv_sec as u64, usage.ru_stime.tv_usec as u32 * 1_000)
    }

    #[test]
    fn members_have_the_events_of_their_bitmaps_and_end_with_the_count() {
        let (mut read, mut write, mut except) =
            ([1_u64 << 63 | 2, 0, 0b111], [2_u64, 0, 0b010], [0_u64, 0, 0b100]);
        let pointers = [read.as_mut_ptr(), write.as_mut_ptr(), except.as_mut_ptr()].map(<*mut u64>::cast);
        let [reads, writes, excepts] = ASKED;
        let all =
            [(1, reads | writes), (63, reads), (128, reads), (129, reads | writes), (130, reads | excepts)];
        for (count, wanted) in
            [(192, 5), (131, 5), (130, 4), (129, 3), (128, 2), (64, 2), (63, 1), (1, 0), (0, 0)]
        {
            let sets = Sets::new(count, pointers);
            assert_eq!(sets.members().collect::<Vec<_>>(), all[..wanted], "{count}");
        }
    }

    #[test]
    fn a_set_that_was_not_given_is_empty_without_system_calls() {
        let mut words = [0b101_u64; 16];
        let sets = Sets::new(3, [words.as_mut_ptr().cast(), null_mut(), null_mut()]);
        assert_eq!(sets.members().map(|(fd, _)| fd).collect::<Vec<_>>(), [0, 2]);
        let before = system_time();
        for _ in 0..1_000_000 {
            assert_eq!(black_box(&sets).any(0), 0b101);
        }
        // Each of two million system calls would take at least a tenth of a microsecond.
        assert!(system_time() - before < Duration::from_millis(100), "{:?}", system_time() - before);
    }
}
