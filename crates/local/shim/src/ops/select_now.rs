//! Answers a select from the kernel alone, before anything is prepared for a wait.
//!
//! The kernel's select knows everything if no descriptor is attached or an epoll instance. A call
//! that finds something then need not mark its connections as inside the kernel (L4), because it
//! does not sleep:
//!
//! ```text
//! no descriptor is attached    the kernel, without a wait        still none is attached
//!            |                              |                              |
//!            +---------- otherwise ---------+--- nothing, or an error -----+---> a wait
//! ```
//!
//! A connection that another thread attaches meanwhile had nothing in its lane when the call began.
//!
//! A call that may wait pays for the kernel twice if there is nothing. So each thread tries this
//! only as often as it has succeeded: see [`crate::base::attempts`].

use std::ffi::c_int;

use libc::sigset_t;

use crate::base::table::{self, WORD as BITS};
use crate::base::{kernel, thread};
use crate::broker::control;
use crate::ops::select::Sets;
use crate::socket::endpoint::{self, Endpoint};

/// A call with more words in a bitmap than an `fd_set` has is not answered here.
const MOST_WORDS: usize = libc::FD_SETSIZE / BITS;

impl Sets {
    /// Answers the call if the kernel alone knows the answer, and it need not wait. The bitmaps can
    /// be read. Returns `None`, with the bitmaps unchanged, otherwise.
    pub(crate) fn answer_now(&self, timeout: Option<u64>, mask: *const sigset_t) -> Option<c_int> {
        if self.words() > MOST_WORDS || !mask.is_null() {
            return None;
        }
        let attempts = &thread::this().attempts;
        let may_wait = timeout != Some(0);
        if may_wait && !attempts.begin() {
            return None;
        }
        control::poll_inbox();
        if self.has_epolls() || self.has_attached() {
            return None;
        }
        let mut copies = [[0; MOST_WORDS]; 3];
        let found = self.ask_kernel(&mut copies)?;
        if may_wait {
            attempts.note(found > 0);
        }
        if found == 0 && may_wait || self.has_attached() {
            return None;
        }
        let given = (0..3).filter(|&set| self.is_given(set));
        let mut stored = given.map(|set| self.store_words(set, &copies[set][..self.words()]));
        Some(if stored.all(|is_stored| is_stored) { found as c_int } else { -1 })
    }

    /// Returns the number that the kernel's select returns, or `None` if it fails.
    fn ask_kernel(&self, copies: &mut [[u64; MOST_WORDS]; 3]) -> Option<usize> {
        let mut sets = [std::ptr::null_mut(); 3];
        for (set, copy) in copies.iter_mut().enumerate().filter(|&(set, _)| self.is_given(set)) {
            for (index, word) in copy.iter_mut().enumerate().take(self.words()) {
                *word = self.word(set, index);
            }
            sets[set] = copy.as_mut_ptr();
        }
        // SAFETY: each has as many words as the program's.
        unsafe { kernel::select_now(self.count() as c_int, sets) }.ok()
    }

    fn has_epolls(&self) -> bool {
        (0..self.words()).any(|index| table::epolls(index) & self.any(index) != 0)
    }

    /// Returns whether one of the descriptors is a connection that is attached.
    fn has_attached(&self) -> bool {
        endpoint::any_is_attached()
            && self.members().any(|(fd, _)| endpoint::behind(fd).is_some_and(Endpoint::is_attached))
    }
}
