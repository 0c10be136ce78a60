//! syscall(2). Some programs use it for calls that have hooks: libuv closes descriptors in this
//! way.
//!
//! A call that has a hook is passed to the hook. Every other call is jumped to unchanged, because a
//! child of clone or vfork returns on a stack where no frame of the shim may be.
//!
//! With syscall, the kernel checks pointers and sizes, while libc's functions use good values of
//! their own or crash. So a call that the kernel would refuse for a bad pointer is made unchanged.

#[cfg(target_arch = "x86_64")]
pub(crate) mod intercept;

use std::ffi::{c_int, c_long, c_void};

use libc::{sigset_t, timespec};
use shunt_abi::reason::Reason;
use shunt_sys::memory;

use super::memory::{note_access, note_growth};
use super::readiness::from_timespec;
use super::trampoline::{Call, trampolines};
use super::{aio, descriptor, epoll, io, message, process, readiness, ring, socket, transfer};
use crate::base::{real, signal};
use crate::fork;
use crate::life::census;
use crate::ops::exec;
use crate::ops::sleep::as_timespec;

trampolines! {
    /// See syscall(2).
    syscall: route;
}

extern "C" fn route(call: &Call) -> *mut c_void {
    // The last argument, which is on the stack, is not needed here.
    let [a, b, c, d, e] = [1, 2, 3, 4, 5].map(|index| call.argument(index) as c_long);
    let (number, arguments) = (call.argument(0) as c_long, Arguments([a, b, c, d, e, 0]));
    lend(number, &arguments);
    if is_answered(number, &arguments) { hooked as *mut c_void } else { real::address!("syscall") }
}

/// Returns whether a hook answers this call. Calls that the shim only has to know about are
/// recorded here.
fn is_answered(number: c_long, call: &Arguments) -> bool {
    match number {
        // If the shim is off, it answers nothing.
        _ if crate::base::process::is_off() => return false,
        libc::SYS_prctl => process::controlling(call.int(0), call.0[1] as u64, call.0[2] as u64),
        libc::SYS_seccomp => match call.0[0] as u32 {
            libc::SECCOMP_SET_MODE_STRICT => process::filtering(false, 0),
            libc::SECCOMP_SET_MODE_FILTER => process::filtering(true, call.0[2] as u64),
            _ => {}
        },
        libc::SYS_io_uring_enter => ring::entering(call.int(0), call.0[1] as u32, call.0[3] as u32),
        libc::SYS_io_uring_register => {
            ring::registering(call.int(0), call.0[1] as u32, call.pointer::<u8>(2), call.0[3] as u32);
        }
        libc::SYS_io_submit => submitting(call),
        libc::SYS_unshare if call.int(0) & libc::CLONE_FILES != 0 => {
            crate::life::untracked::leave(Reason::OwnTable);
        }
        libc::SYS_chroot => exec::before_other_root(),
        // These change only the calling thread. libc's functions change all threads.
        libc::SYS_setuid => exec::before_other_user(call.0[0] as u32),
        libc::SYS_setreuid | libc::SYS_setresuid => exec::before_other_user(call.0[1] as u32),
        // glibc's fcntl translates the sign of the owner, so this call is made unchanged.
        libc::SYS_fcntl if call.int(1) == libc::F_GETOWN => {}
        libc::SYS_clone if !is_fork(call.0[0] as u64, call.0[1] as u64) => {}
        libc::SYS_clone3 if !is_clone3_fork(call) => {}
        _ => return hook(number).is_some(),
    }
    false
}

/// Records a call that makes a child which runs in this memory.
#[inline]
fn lend(number: c_long, call: &Arguments) {
    match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => process::lending(libc::CLONE_VM | libc::CLONE_VFORK),
        libc::SYS_clone => process::lending(call.int(0)),
        libc::SYS_clone3 => {
            process::lending(clone_arguments(call).map_or(0, |arguments| arguments.flags as c_int))
        }
        _ => {}
    }
}

/// Returns whether clone makes a process that has its own memory and continues on the parent's
/// stack.
fn is_fork(flags: u64, stack: u64) -> bool {
    flags & libc::CLONE_VM as u64 == 0 && stack == 0
}

fn is_clone3_fork(call: &Arguments) -> bool {
    clone_arguments(call).is_some_and(|arguments| is_fork(arguments.flags, arguments.stack))
}

/// The beginning of `struct clone_args`.
#[derive(Clone, Copy)]
#[repr(C)]
struct CloneArgs {
    flags: u64,
    unused: [u64; 4],
    stack: u64,
}

fn clone_arguments(call: &Arguments) -> Option<CloneArgs> {
    let (arguments, size) = (call.pointer::<CloneArgs>(0).cast_const(), call.size(1));
    // SAFETY: the program's argument, which consists of integers.
    (size >= size_of::<CloneArgs>()).then(|| unsafe { memory::read(arguments) }).flatten()
}

/// Handles io_submit, the kernel's asynchronous I/O. Its requests refer to the sockets that they
/// read, write or poll.
fn submitting(call: &Arguments) {
    /// The beginning of `struct iocb`.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Iocb {
        unused: [u64; 2],
        operation: u32,
        fd: u32,
    }
    let (count, list) = (call.0[1], call.pointer::<*const Iocb>(2).cast_const());
    for index in 0..count.max(0) as usize {
        // The kernel stops at the first request that it cannot read.
        // SAFETY: the program's list and requests, which consist of integers.
        let request =
            unsafe { memory::read(list.wrapping_add(index)).and_then(|request| memory::read(request)) };
        let Some(request) = request else { break };
        aio::going_async(request.fd as c_int);
    }
}

/// The arguments of one call. A call may use only some of them.
struct Arguments([c_long; 6]);

impl Arguments {
    fn int(&self, index: usize) -> c_int {
        self.0[index] as c_int
    }

    fn size(&self, index: usize) -> usize {
        self.0[index] as usize
    }

    fn pointer<T>(&self, index: usize) -> *mut T {
        self.0[index] as *mut T
    }
}

/// Makes a call that has a hook. The C calling convention passes variadic arguments like named
/// ones.
unsafe extern "C-unwind" fn hooked(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    unsafe extern "C" {
        fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    }
    const PTHREAD_CANCEL_DISABLE: c_int = 1;
    let Some(hook) = hook(number) else { unreachable!("route has looked") };
    let mut state = 0;
    // SAFETY: the program's own call, with its own arguments. Cancellation is disabled, because the
    // hooks are cancellation points and syscall is not.
    unsafe {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut state);
        let result = hook(&Arguments([a, b, c, d, e, f]));
        pthread_setcancelstate(state, &mut state);
        result
    }
}

type Hook = unsafe fn(&Arguments) -> c_long;

macro_rules! hooks {
    ($($(#[$here:meta])* $number:ident: |$a:ident| $call:expr,)*) => {
        #[cfg(target_arch = "x86_64")]
        const HOOKED: &[c_long] = &[$(libc::$number),*];

        /// Returns the hook that answers a system call.
        ///
        /// # Safety
        /// Each returned function: as its system call.
        fn hook(number: c_long) -> Option<Hook> {
            match number {
                $($(#[$here])* libc::$number => {
                    unsafe fn hook($a: &Arguments) -> c_long {
                        // SAFETY: the caller's promise.
                        unsafe { $call as c_long }
                    }
                    Some(hook as Hook)
                })*
                _ => None,
            }
        }
    };
}

hooks! {
    SYS_read: |a| io::read(a.int(0), a.pointer(1), a.size(2)),
    SYS_write: |a| io::write(a.int(0), a.pointer(1), a.size(2)),
    SYS_readv: |a| io::readv(a.int(0), a.pointer(1), a.int(2)),
    SYS_writev: |a| io::writev(a.int(0), a.pointer(1), a.int(2)),
    // The upper half of the offset is a separate argument, which 64-bit kernels ignore.
    SYS_preadv2: |a| io::preadv2(a.int(0), a.pointer(1), a.int(2), a.0[3], a.int(5)),
    SYS_pwritev2: |a| io::pwritev2(a.int(0), a.pointer(1), a.int(2), a.0[3], a.int(5)),
    SYS_recvfrom: |a| io::recvfrom(a.int(0), a.pointer(1), a.size(2), a.int(3), a.pointer(4), a.pointer(5)),
    SYS_sendto: |a| io::sendto(a.int(0), a.pointer(1), a.size(2), a.int(3), a.pointer(4), a.0[5] as u32),
    SYS_recvmsg: |a| message::recvmsg(a.int(0), a.pointer(1), a.int(2)),
    SYS_sendmsg: |a| message::sendmsg(a.int(0), a.pointer(1), a.int(2)),
    SYS_recvmmsg: |a| message::recvmmsg(a.int(0), a.pointer(1), a.0[2] as u32, a.int(3), a.pointer(4)),
    SYS_sendmmsg: |a| message::sendmmsg(a.int(0), a.pointer(1), a.0[2] as u32, a.int(3)),
    SYS_sendfile: |a| transfer::sendfile64(a.int(0), a.int(1), a.pointer(2), a.size(3)),
    SYS_splice: |a| transfer::splice(a.int(0), a.pointer(1), a.int(2), a.pointer(3), a.size(4), a.0[5] as u32),
    SYS_socket: |a| socket::socket(a.int(0), a.int(1), a.int(2)),
    SYS_connect: |a| socket::connect(a.int(0), a.pointer(1), a.0[2] as u32),
    SYS_accept: |a| socket::accept(a.int(0), a.pointer(1), a.pointer(2)),
    SYS_accept4: |a| socket::accept4(a.int(0), a.pointer(1), a.pointer(2), a.int(3)),
    SYS_shutdown: |a| socket::shutdown(a.int(0), a.int(1)),
    SYS_getpeername: |a| socket::getpeername(a.int(0), a.pointer(1), a.pointer(2)),
    SYS_getsockopt: |a| socket::getsockopt(a.int(0), a.int(1), a.int(2), a.pointer(3), a.pointer(4)),
    SYS_setsockopt: |a| socket::setsockopt(a.int(0), a.int(1), a.int(2), a.pointer(3), a.0[4] as u32),
    SYS_close: |a| descriptor::close(a.int(0)),
    SYS_close_range: |a| descriptor::close_range(a.0[0] as u32, a.0[1] as u32, a.int(2)),
    SYS_dup: |a| descriptor::dup(a.int(0)),
    #[cfg(target_arch = "x86_64")]
    SYS_dup2: |a| descriptor::dup2(a.int(0), a.int(1)),
    SYS_dup3: |a| descriptor::dup3(a.int(0), a.int(1), a.int(2)),
    SYS_fcntl: |a| descriptor::fcntl64(a.int(0), a.int(1), a.0[2] as u64),
    SYS_ioctl: |a| descriptor::ioctl(a.int(0), a.0[1] as u64, a.pointer(2)),
    SYS_munmap: |a| changing_memory(libc::SYS_munmap, a),
    SYS_mprotect: |a| changing_memory(libc::SYS_mprotect, a),
    SYS_pkey_mprotect: |a| changing_memory(libc::SYS_pkey_mprotect, a),
    SYS_mmap: |a| mapping_anew(a),
    SYS_mremap: |a| remapping(a),
    SYS_mlockall: |a| super::memory::mlockall(a.int(0)),
    #[cfg(target_arch = "x86_64")]
    SYS_poll: |a| readiness::poll(a.pointer(0), a.0[1] as u64, a.int(2)),
    SYS_ppoll: |a| with_mask(libc::SYS_ppoll, a, (a.pointer(3), a.size(4)), |mask| with_time(
        libc::SYS_ppoll, a, a.pointer(2), |time| readiness::ppoll(a.pointer(0), a.0[1] as u64, time, mask)
    )),
    #[cfg(target_arch = "x86_64")]
    SYS_select: |a| readiness::select_by_number(a.int(0), a.pointer(1), a.pointer(2), a.pointer(3), a.pointer(4)),
    SYS_pselect6: |a| pselect6(a),
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_create: |a| epoll::epoll_create(a.int(0)),
    SYS_epoll_create1: |a| epoll::epoll_create1(a.int(0)),
    SYS_epoll_ctl: |a| epoll::epoll_ctl(a.int(0), a.int(1), a.int(2), a.pointer(3)),
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_wait: |a| epoll::epoll_wait(a.int(0), a.pointer(1), a.int(2), a.int(3)),
    SYS_epoll_pwait: |a| with_mask(libc::SYS_epoll_pwait, a, (a.pointer(4), a.size(5)), |mask| {
        epoll::epoll_pwait(a.int(0), a.pointer(1), a.int(2), a.int(3), mask)
    }),
    SYS_epoll_pwait2: |a| with_mask(libc::SYS_epoll_pwait2, a, (a.pointer(4), a.size(5)), |mask| {
        epoll::epoll_pwait2(a.int(0), a.pointer(1), a.int(2), a.pointer(3), mask)
    }),
    SYS_rt_sigaction: |a| sigaction(a),
    SYS_io_uring_setup: |a| ring::made_by(a.pointer(1), || by_number(libc::SYS_io_uring_setup, a)),
    SYS_execve: |a| process::execve(a.pointer(0), a.pointer(1), a.pointer(2)),
    SYS_execveat: |a| process::execveat(a.int(0), a.pointer(1), a.pointer(2), a.pointer(3), a.int(4)),
    #[cfg(target_arch = "x86_64")]
    SYS_fork: |a| forking(libc::SYS_fork, a),
    SYS_clone: |a| forking(libc::SYS_clone, a),
    SYS_clone3: |a| forking(libc::SYS_clone3, a),
}

/// Makes the system call with its arguments unchanged.
unsafe fn by_number(number: c_long, a: &Arguments) -> c_long {
    // SAFETY: the caller's promise.
    unsafe { real::syscall(number, a.0[0], a.0[1], a.0[2], a.0[3], a.0[4], a.0[5]) }
}

/// Makes a call that changes memory, directly rather than by libc's function. An allocator behind
/// this library may define `munmap`, and make this very call in it.
unsafe fn changing_memory(number: c_long, a: &Arguments) -> c_long {
    let is_judged = number == libc::SYS_munmap || note_access(a.size(0), a.size(1), a.int(2));
    // SAFETY: the caller's promise.
    let result = unsafe { by_number(number, a) };
    if !is_judged {
        census::code_has_come();
    }
    memory::forget(a.size(0), a.size(1));
    result
}

/// Makes a call that returns the address of a mapping of `len` bytes.
unsafe fn mapping(number: c_long, a: &Arguments, len: usize) -> c_long {
    // SAFETY: the caller's promise.
    let mapped = unsafe { by_number(number, a) };
    if mapped != -1 {
        memory::forget(mapped as usize, len);
    }
    mapped
}

/// Calls mmap, and has the mapping judged if it is executable.
unsafe fn mapping_anew(a: &Arguments) -> c_long {
    // SAFETY: the caller's promise.
    let mapped = unsafe { mapping(libc::SYS_mmap, a, a.size(1)) };
    if mapped != -1 && !note_access(mapped as usize, a.size(1), a.int(2)) {
        census::code_has_come();
    }
    mapped
}

/// Calls mremap, which may move or shrink the mapping.
unsafe fn remapping(a: &Arguments) -> c_long {
    // SAFETY: the caller's promise.
    let mapped = unsafe { mapping(libc::SYS_mremap, a, a.size(2)) };
    memory::forget(a.size(0), a.size(1));
    if mapped != -1 {
        note_growth(a.size(0), a.size(1), a.size(2));
    }
    mapped
}

/// Makes a fork by a system call. libc does not know of it, so libc runs no fork handlers.
unsafe fn forking(number: c_long, a: &Arguments) -> c_long {
    // SAFETY: the caller's promise. The same calls surround every other fork.
    unsafe {
        fork::before();
        let pid = by_number(number, a);
        // A forked child has one thread.
        match pid {
            0 => fork::after_in_child(),
            _ => fork::after_in_parent(),
        }
        if pid < 0 {
            fork::failed();
        }
        pid
    }
}

/// Size of the kernel's signal set.
const SIZE_OF_MASK: usize = size_of::<u64>();

/// Calls rt_sigaction. The kernel refuses a mask of another size.
unsafe fn sigaction(a: &Arguments) -> c_long {
    // SAFETY: the caller's promise.
    unsafe {
        match a.size(3) {
            SIZE_OF_MASK => signal::kernel_sigaction(a.int(0), a.pointer(1), a.pointer(2)),
            _ => by_number(libc::SYS_rt_sigaction, a),
        }
    }
}

/// Calls `wait` with a mask of the right size. libc's functions take no size, and the kernel
/// refuses a mask of another size.
///
/// # Safety
/// As the system call `number`.
unsafe fn with_mask(
    number: c_long,
    a: &Arguments,
    (mask, size): (*const sigset_t, usize),
    wait: impl FnOnce(*const sigset_t) -> c_int,
) -> c_int {
    if mask.is_null() || size == SIZE_OF_MASK {
        return wait(mask);
    }
    // SAFETY: the caller's promise.
    unsafe { by_number(number, a) as c_int }
}

/// Calls `wait` with a timeout, and stores the remaining time afterwards. The kernel does so too,
/// while libc's functions copy the timeout to hide that.
///
/// # Safety
/// As the system call `number`; `time` is the program's argument.
unsafe fn with_time(
    number: c_long,
    a: &Arguments,
    time: *mut timespec,
    wait: impl FnOnce(*const timespec) -> c_int,
) -> c_int {
    if time.is_null() {
        return wait(time);
    }
    // SAFETY: the caller's promise.
    let (Some(given), Ok(nanos)) = (unsafe { memory::read(time) }, unsafe { from_timespec(time) }) else {
        // SAFETY: the caller's promise.
        return unsafe { by_number(number, a) as c_int };
    };
    let begin = crate::base::process::now();
    let result = wait(&given);
    if let Some(nanos) = nanos {
        let left = nanos.saturating_sub(crate::base::process::now() - begin);
        // SAFETY: the program passed this address for the remaining time.
        unsafe { memory::write(time, as_timespec(left)) };
    }
    result
}

/// Calls pselect6, whose sixth argument points to the mask and its size.
///
/// # Safety
/// As the system call.
unsafe fn pselect6(a: &Arguments) -> c_int {
    let number = libc::SYS_pselect6;
    let pair: *const [usize; 2] = a.pointer(5);
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let Some([mask, size]) = (if pair.is_null() { Some([0, 0]) } else { memory::read(pair) }) else {
            return by_number(number, a) as c_int;
        };
        with_mask(number, a, (mask as *const sigset_t, size), |mask| {
            with_time(number, a, a.pointer(4), |time| {
                readiness::pselect(a.int(0), a.pointer(1), a.pointer(2), a.pointer(3), time, mask)
            })
        })
    }
}
