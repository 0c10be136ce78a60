//! A thread that stays inside a system call for as long as the test wants. The kernel waits for a
//! page of its memory that does not come, and meanwhile holds the lock that the call has taken.
//! Needs root, for userfaultfd.

use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, munmap, userfaultfd};

pub(crate) const PAGE: usize = 4096;
/// `UFFDIO_API`, `UFFDIO_REGISTER`, and their arguments.
const HELLO: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const VERSION: u64 = 0xaa;
const MISSING: u64 = 1;

/// A page that arrives only when this is dropped. A thread that touches it waits until then.
struct Page {
    start: NonNull<u8>,
    faults: Option<OwnedFd>,
}

impl Page {
    fn new() -> Page {
        // SAFETY: a new mapping at an address of the kernel's choice, and a new descriptor.
        let (start, faults) = unsafe {
            let start =
                mmap_anonymous(ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            (start.unwrap(), userfaultfd(UserfaultfdFlags::CLOEXEC).unwrap())
        };
        let ask = |request: u64, words: &mut [u64]| {
            // SAFETY: the kernel reads and writes as many words as the request has.
            let done = unsafe { libc::ioctl(faults.as_raw_fd(), request, words.as_mut_ptr()) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        };
        ask(HELLO, &mut [VERSION, 0, 0]);
        ask(REGISTER, &mut [start as u64, PAGE as u64, MISSING, 0]);
        Page { start: NonNull::new(start.cast()).unwrap(), faults: Some(faults) }
    }

    /// Waits until a thread has touched the page.
    fn is_waited_for(&self) {
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        let mut asked = [PollFd::new(self.faults.as_ref().unwrap(), PollFlags::IN)];
        assert_eq!(poll(&mut asked, Some(&patience)).unwrap(), 1, "nobody has touched the page");
    }
}

/// A thread that stays inside a system call until this is dropped.
pub(crate) struct Stuck {
    page: Page,
    caller: Option<JoinHandle<()>>,
}

impl Stuck {
    pub(crate) fn in_call(call: impl FnOnce(*mut u8) + Send + 'static) -> Stuck {
        let page = Page::new();
        let start = page.start.as_ptr() as usize;
        let caller = Some(std::thread::spawn(move || call(start as *mut u8)));
        page.is_waited_for();
        Stuck { page, caller }
    }

    /// Holds the lock of a connection's socket.
    pub(crate) fn sending(socket: &TcpStream) -> Stuck {
        let socket = socket.try_clone().unwrap();
        Stuck::in_call(move |page| {
            // SAFETY: a page of ours, which outlives the call.
            let sent = unsafe { libc::send(socket.as_raw_fd(), page.cast(), PAGE, 0) };
            assert_eq!(sent, PAGE as isize);
        })
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // From here on, the kernel itself supplies the page.
        drop(self.page.faults.take());
        let ended = self.caller.take().unwrap().join();
        // SAFETY: the thread that used the page has ended.
        unsafe { munmap(self.page.start.as_ptr().cast(), PAGE) }.unwrap();
        assert!(std::thread::panicking() || ended.is_ok());
    }
}
