//! io_uring, by liburing's functions or by system calls. `crate::ops::ring` inspects the submitted
//! entries.
//!
//! liburing makes its system calls by inline instructions, so the hooks are of liburing's
//! functions: each one that makes a ring, and each one that submits.

use std::ffi::{CStr, c_int, c_long, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::{epoll_event, msghdr};
use shunt_sys::memory;
use shunt_sys::uring::{Params, Shape};

use super::trampoline::{Call, trampolines};
use super::{epoll, message};
use crate::base::{errno, split};
use crate::ops::{descriptors, ring};

trampolines! {
    /// See io_uring_setup(2).
    io_uring_setup: before_setup;
    /// See io_uring_queue_init(3).
    io_uring_queue_init: before_queue_init;
    /// See io_uring_queue_init_params(3).
    io_uring_queue_init_params: before_queue_init_params;
    /// See io_uring_queue_init_mem(3).
    io_uring_queue_init_mem: before_queue_init_mem;
    /// As io_uring_queue_init.
    io_uring_queue_init_try_nosqarr: before_queue_init_try_nosqarr;
    /// Maps a ring that was made by the system call.
    io_uring_queue_mmap: before_queue_mmap;
    /// See io_uring_queue_exit(3).
    io_uring_queue_exit: before_queue_exit;
    /// See io_uring_close_ring_fd(3).
    io_uring_close_ring_fd: before_close_ring_fd;
    /// See io_uring_submit(3).
    io_uring_submit: before_submit;
    /// See io_uring_submit_and_wait(3).
    io_uring_submit_and_wait: before_submit_and_wait;
    /// See io_uring_submit_and_wait_timeout(3).
    io_uring_submit_and_wait_timeout: before_submit_and_wait_timeout;
    /// See io_uring_submit_and_wait_min_timeout(3).
    io_uring_submit_and_wait_min_timeout: before_submit_and_wait_min_timeout;
    /// See io_uring_submit_and_wait_reg(3).
    io_uring_submit_and_wait_reg: before_submit_and_wait_reg;
    /// See io_uring_submit_and_get_events(3).
    io_uring_submit_and_get_events: before_submit_and_get_events;
    /// See io_uring_wait_cqes(3). It may submit a timeout, together with earlier entries.
    io_uring_wait_cqes: before_wait_cqes;
    /// See io_uring_wait_cqes_min_timeout(3).
    io_uring_wait_cqes_min_timeout: before_wait_cqes_min_timeout;
    /// As io_uring_wait_cqes.
    io_uring_wait_cqe_timeout: before_wait_cqe_timeout;
    /// The common part of io_uring_wait_cqe_nr(3) and others.
    __io_uring_get_cqe: before_get_cqe;
    /// See io_uring_enter(2).
    io_uring_enter: before_enter;
    /// See io_uring_enter2(2).
    io_uring_enter2: before_enter2;
    /// See io_uring_register(2).
    io_uring_register: before_register;
    /// See io_uring_register_files(3).
    io_uring_register_files: before_register_files;
    /// See io_uring_register_files_tags(3).
    io_uring_register_files_tags: before_register_files_tags;
    /// See io_uring_register_files_update(3).
    io_uring_register_files_update: before_register_files_update;
    /// See io_uring_register_files_update_tag(3).
    io_uring_register_files_update_tag: before_register_files_update_tag;
    /// See io_uring_resize_rings(3).
    io_uring_resize_rings: before_resize_rings;
}

/// Returns the function of this name that the caller would have called without the shim.
macro_rules! in_liburing {
    ($name:literal, $call:expr) => {{
        static CELL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
        find(&CELL, $name, $call.caller)
    }};
}

/// Defines functions that run before a function of liburing, which is then jumped to.
macro_rules! before {
    ($($before:ident($call:ident) = $name:literal: $what:expr;)*) => { $(
        extern "C" fn $before($call: &Call) -> *mut c_void {
            $what;
            in_liburing!($name, $call)
        }
    )* };
}

before! {
    before_queue_init_mem(call) = c"io_uring_queue_init_mem": ring::lost();
    before_queue_exit(call) = c"io_uring_queue_exit": exiting(call);
    before_close_ring_fd(call) = c"io_uring_close_ring_fd": ring::lost();
    before_submit(call) = c"io_uring_submit": submitting(call);
    before_submit_and_wait(call) = c"io_uring_submit_and_wait": submitting(call);
    before_submit_and_wait_timeout(call) = c"io_uring_submit_and_wait_timeout": submitting(call);
    before_submit_and_wait_min_timeout(call) = c"io_uring_submit_and_wait_min_timeout": submitting(call);
    before_submit_and_wait_reg(call) = c"io_uring_submit_and_wait_reg": submitting(call);
    before_submit_and_get_events(call) = c"io_uring_submit_and_get_events": submitting(call);
    before_wait_cqes(call) = c"io_uring_wait_cqes": waiting(call);
    before_wait_cqes_min_timeout(call) = c"io_uring_wait_cqes_min_timeout": waiting(call);
    before_wait_cqe_timeout(call) = c"io_uring_wait_cqe_timeout": waiting(call);
    before_get_cqe(call) = c"__io_uring_get_cqe": if call.argument(2) as u32 != 0 { submitting(call) };
    before_enter(call) = c"io_uring_enter": entering_by(call);
    before_enter2(call) = c"io_uring_enter2": entering_by(call);
    before_register(call) = c"io_uring_register":
        registering(call.argument(0) as c_int, call.argument(1) as u32, pointer(call, 2), call.argument(3) as u32);
    before_register_files(call) = c"io_uring_register_files": ring::adding(pointer(call, 1).cast(), call.argument(2) as u32);
    before_register_files_tags(call) = c"io_uring_register_files_tags":
        ring::adding(pointer(call, 1).cast(), call.argument(3) as u32);
    before_register_files_update(call) = c"io_uring_register_files_update":
        ring::adding(pointer(call, 2).cast(), call.argument(3) as u32);
    before_register_files_update_tag(call) = c"io_uring_register_files_update_tag":
        ring::adding(pointer(call, 2).cast(), call.argument(4) as u32);
    before_resize_rings(call) = c"io_uring_resize_rings": ring::lost();
}

extern "C" fn before_setup(call: &mut Call) -> *mut c_void {
    let (function, params) = (in_liburing!(c"io_uring_setup", call), pointer(call, 1).cast());
    let result = made_by(params, || c_long::from(call_it(function, call)));
    call.answer(result as c_int)
}

macro_rules! makes_queue {
    ($($before:ident = $name:literal;)*) => { $(
        extern "C" fn $before(call: &mut Call) -> *mut c_void {
            let function = in_liburing!($name, call);
            let result = call_it(function, call);
            if result >= 0 {
                made_queue(pointer(call, 1).cast());
            }
            call.answer(result)
        }
    )* };
}

makes_queue! {
    before_queue_init = c"io_uring_queue_init";
    before_queue_init_params = c"io_uring_queue_init_params";
    before_queue_init_try_nosqarr = c"io_uring_queue_init_try_nosqarr";
}

/// Handles io_uring_queue_mmap. liburing itself calls it while one of the hooked functions makes a
/// ring. Any other caller may pass any ring.
extern "C" fn before_queue_mmap(call: &Call) -> *mut c_void {
    let function = in_liburing!(c"io_uring_queue_mmap", call);
    if !is_in_one_file(function, call.caller) {
        ring::met(call.argument(0) as c_int);
    }
    function
}

fn is_in_one_file(one: *const c_void, other: *const c_void) -> bool {
    let [one, other] = [one, other].map(|address| {
        // SAFETY: dladdr fills the structure in before it is read.
        unsafe {
            let mut info = std::mem::zeroed::<libc::Dl_info>();
            (libc::dladdr(address, &mut info) != 0).then_some(info.dli_fbase)
        }
    });
    one.is_some() && one == other
}

fn call_it(function: *mut c_void, call: &Call) -> c_int {
    type Function = extern "C" fn(u64, u64, u64, u64, u64, u64) -> c_int;
    // SAFETY: the program's own call. The function ignores the arguments that it does not have.
    let function: Function = unsafe { std::mem::transmute(function) };
    let [a, b, c, d, e, f] = [0, 1, 2, 3, 4, 5].map(|index| call.argument(index));
    function(a, b, c, d, e, f)
}

fn pointer(call: &Call, index: usize) -> *const u8 {
    call.argument(index) as *const u8
}

/// Makes a ring. The kernel describes it in `params`.
pub(super) fn made_by(params: *const Params, make: impl FnOnce() -> c_long) -> c_long {
    let result = make();
    if result >= 0 {
        // SAFETY: the program's argument, which consists of integers.
        match unsafe { memory::read(params) } {
            Some(params) => ring::made(result as c_int, params.shape()),
            None => ring::lost(),
        }
    }
    result
}

/// liburing's `struct io_uring`. Its layout is the same in all versions, because programs read it
/// by inlined functions.
#[derive(Clone, Copy)]
#[repr(C)]
struct Liburing {
    head: usize,
    tail: usize,
    mask: usize,
    entries: usize,
    flags_and_dropped: [usize; 2],
    array: usize,
    unused: usize,
    first_filled: u32,
    end: u32,
    len: usize,
    start: usize,
    more: [u32; 4],
    completions: [usize; 11],
    flags: u32,
    fd: c_int,
    features: u32,
}

impl Liburing {
    fn of(call: &Call) -> Option<Liburing> {
        // SAFETY: the program's argument, which consists of integers.
        unsafe { memory::read(pointer(call, 0).cast()) }
    }

    fn shape(&self) -> Option<Shape> {
        // SAFETY: a word in the memory of the ring.
        let entries = unsafe { memory::read(self.entries as *const u32) }?;
        let at = |address: usize| u32::try_from(address.checked_sub(self.start)?).ok();
        Some(Shape {
            head: at(self.head)?,
            tail: at(self.tail)?,
            array: if self.array == 0 { 0 } else { at(self.array)? },
            entries,
            flags: self.flags,
        })
    }
}

fn made_queue(queue: *const Liburing) {
    // SAFETY: the program's argument, which consists of integers.
    let queue = unsafe { memory::read(queue) };
    match queue.and_then(|queue| Some((queue.fd, queue.shape()?))) {
        Some((fd, shape)) => ring::made(fd, shape),
        None => ring::lost(),
    }
}

/// Handles a submission. The entries up to `end` are filled in, and liburing publishes them to the
/// kernel in this call.
fn submitting(call: &Call) {
    if let Some(queue) = Liburing::of(call) {
        ring::submitting(queue.fd, Some(queue.end), &Hooks);
    }
}

/// Handles a wait with a timeout. On a kernel that takes no timeout with the wait, liburing submits
/// a timeout entry, and all entries before it.
fn waiting(call: &Call) {
    const TIME_OF_WAIT: u32 = 1 << 8;
    if Liburing::of(call).is_some_and(|queue| queue.features & TIME_OF_WAIT == 0) {
        submitting(call);
    }
}

fn exiting(call: &Call) {
    if let Some(queue) = Liburing::of(call) {
        descriptors::forget_ring(queue.fd);
    }
}

fn entering_by(call: &Call) {
    entering(call.argument(0) as c_int, call.argument(1) as u32, call.argument(3) as u32);
}

/// See io_uring_enter(2).
pub(super) fn entering(fd: c_int, count: u32, flags: u32) {
    /// The ring is given by its registered index, see [`registering`].
    const REGISTERED: u32 = 1 << 4;
    if flags & REGISTERED != 0 {
        ring::lost();
    } else if count > 0 {
        ring::submitting(fd, None, &Hooks);
    }
}

/// See io_uring_register(2).
pub(super) fn registering(fd: c_int, operation: u32, argument: *const u8, count: u32) {
    const REGISTERED: u32 = 1 << 31;
    if operation & REGISTERED != 0 {
        ring::lost();
    } else {
        ring::registering(fd, operation, argument, count);
    }
}

/// Passes submitted entries to the hooks of the corresponding calls.
struct Hooks;

impl ring::Calls for Hooks {
    unsafe fn epoll_ctl(&self, set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { epoll::epoll_ctl(set, operation, fd, event) }
    }

    unsafe fn pass_on(&self, message: *const msghdr) {
        // SAFETY: the caller's promise.
        unsafe { message::pass_on(message) };
    }
}

/// Returns the function `name` that `caller` would have called without the shim.
fn find(cell: &AtomicPtr<c_void>, name: &CStr, caller: *const c_void) -> *mut c_void {
    let found = cell.load(Relaxed);
    if !found.is_null() {
        return found;
    }
    let before = errno::get();
    // SAFETY: look-ups of a constant name. `caller` is in a file that stays loaded, because the
    // call returns there.
    let found = unsafe {
        let found = split::dlsym(libc::RTLD_NEXT, name.as_ptr());
        if found.is_null() {
            // A plugin may bring a liburing that only this plugin can see, so the result is not
            // cached. Or the program has loaded liburing itself, and got this function from dlsym.
            let found = in_plugin(name, caller);
            if found.is_null() { split::find_behind(name) } else { found }
        } else {
            cell.store(found, Relaxed);
            found
        }
    };
    errno::set(before);
    if found.is_null() { no_rings as *mut c_void } else { found }
}

/// # Safety
/// `caller` is in a file that stays loaded.
unsafe fn in_plugin(name: &CStr, caller: *const c_void) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        if libc::dladdr(caller, &mut info) == 0 {
            return std::ptr::null_mut();
        }
        let plugin = split::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if plugin.is_null() {
            return std::ptr::null_mut();
        }
        let found = split::dlsym(plugin, name.as_ptr());
        libc::dlclose(plugin);
        found
    }
}

/// Returns the result of liburing's functions on a kernel without io_uring.
extern "C" fn no_rings() -> c_int {
    -libc::ENOSYS
}
