//! Substitutes for the libc functions that this library calls, in a program without libc. Most are
//! a system call each.

use std::arch::{asm, naked_asm};
use std::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::timespec;
use shunt_abi::intercept::{Code, Control, Function};

static ENVIRONMENT: AtomicPtr<*const c_char> = AtomicPtr::new(std::ptr::null_mut());
/// The auxiliary vector, which follows the environment.
static TOLD: AtomicPtr<[c_ulong; 2]> = AtomicPtr::new(std::ptr::null_mut());

/// Remembers the environment and the auxiliary vector behind it.
///
/// # Safety
/// `environment` is the environment as the kernel put it on the stack.
pub(super) unsafe fn start(environment: *const *const c_char) {
    ENVIRONMENT.store(environment.cast_mut(), Relaxed);
    // SAFETY: the caller's promise: it ends in a null.
    unsafe {
        let mut end = environment;
        while !(*end).is_null() {
            end = end.add(1);
        }
        TOLD.store(end.add(1).cast_mut().cast(), Relaxed);
    }
}

macro_rules! functions {
    ($($name:ident = $at:expr;)*) => {
        /// All substitutes.
        pub(super) static FUNCTIONS: &[Function] = &[$(
            // SAFETY: only the address is used. Each caller knows the function's type.
            Function { name: &concat!(stringify!($name), "\0").as_bytes()[0], at: unsafe { std::mem::transmute::<*const (), Code>($at as *const ()) } },
        )*];
    };
}

functions! {
    memcpy = memcpy;
    memmove = memmove;
    memset = memset;
    bcmp = bcmp;
    strlen = strlen;
    abort = abort;
    // The other functions are looked up by this one (`base::split`).
    shunt_dlsym = dlsym;
    dlopen = nothing;
    dladdr = nothing;
    dl_iterate_phdr = nothing;
    getauxval = getauxval;
    getenv = getenv;
    __errno_location = errno_location;
    __libc_current_sigrtmin = first_of_real_time;
    sigaddset = sigaddset;
    sigfillset = sigfillset;
    sigismember = sigismember;
    sigprocmask = sigprocmask;
    // A thread's end is noticed by its system call. Without libc, there is no cancellation.
    pthread_key_create = nothing;
    pthread_setspecific = nothing;
    pthread_setcancelstate = nothing;
    pthread_setcanceltype = nothing;
    pthread_testcancel = nothing;
    // Makes the library use glibc's structures, which are the kernel's.
    gnu_get_libc_version = nothing;
    syscall = syscall;
    sigaction = sigaction;
    getpid = getpid;
    getrandom = getrandom;
    socket = socket;
    connect = connect;
    accept = accept;
    accept4 = accept4;
    shutdown = shutdown;
    getpeername = getpeername;
    close = close;
    close_range = close_range;
    dup = dup;
    dup2 = dup2;
    dup3 = dup3;
    fcntl64 = fcntl;
    ioctl = ioctl;
    getsockopt = getsockopt;
    setsockopt = setsockopt;
    read = read;
    write = write;
    readv = readv;
    writev = writev;
    preadv2 = preadv2;
    pwritev2 = pwritev2;
    recv = recv;
    send = send;
    recvfrom = recvfrom;
    sendto = sendto;
    recvmsg = recvmsg;
    sendmsg = sendmsg;
    recvmmsg = recvmmsg;
    sendmmsg = sendmmsg;
    sendfile64 = sendfile;
    splice = splice;
    poll = poll;
    ppoll = ppoll;
    select = select;
    pselect = pselect;
    epoll_create = epoll_create;
    epoll_create1 = epoll_create1;
    epoll_ctl = epoll_ctl;
    epoll_wait = epoll_wait;
    epoll_pwait = epoll_pwait;
    epoll_pwait2 = epoll_pwait2;
    munmap = munmap;
    mlockall = mlockall;
    mprotect = mprotect;
    execve = execve;
    execveat = execveat;
    // All functions that are not in this list. None of them is called in such a program.
    missing = missing;
}

macro_rules! by_number {
    ($($name:ident($($argument:ident),*) = $number:ident($($given:expr),*);)*) => { $(
        unsafe extern "C" fn $name($($argument: c_long),*) -> c_long {
            // SAFETY: the caller's promise.
            returned(unsafe { call(libc::$number, six([$($given),*])) })
        }
    )* };
}

/// Size of the kernel's signal mask.
const MASK: c_long = 8;

by_number! {
    getpid() = SYS_getpid();
    getrandom(to, len, flags) = SYS_getrandom(to, len, flags);
    socket(domain, kind, protocol) = SYS_socket(domain, kind, protocol);
    connect(fd, address, len) = SYS_connect(fd, address, len);
    accept(fd, address, len) = SYS_accept(fd, address, len);
    accept4(fd, address, len, flags) = SYS_accept4(fd, address, len, flags);
    shutdown(fd, how) = SYS_shutdown(fd, how);
    getpeername(fd, address, len) = SYS_getpeername(fd, address, len);
    close(fd) = SYS_close(fd);
    close_range(first, last, flags) = SYS_close_range(first, last, flags);
    dup(fd) = SYS_dup(fd);
    dup2(old, new) = SYS_dup2(old, new);
    dup3(old, new, flags) = SYS_dup3(old, new, flags);
    fcntl(fd, command, argument) = SYS_fcntl(fd, command, argument);
    ioctl(fd, request, argument) = SYS_ioctl(fd, request, argument);
    getsockopt(fd, level, name, value, len) = SYS_getsockopt(fd, level, name, value, len);
    setsockopt(fd, level, name, value, len) = SYS_setsockopt(fd, level, name, value, len);
    read(fd, to, len) = SYS_read(fd, to, len);
    write(fd, from, len) = SYS_write(fd, from, len);
    readv(fd, list, count) = SYS_readv(fd, list, count);
    writev(fd, list, count) = SYS_writev(fd, list, count);
    preadv2(fd, list, count, offset, flags) = SYS_preadv2(fd, list, count, offset, 0, flags);
    pwritev2(fd, list, count, offset, flags) = SYS_pwritev2(fd, list, count, offset, 0, flags);
    recv(fd, to, len, flags) = SYS_recvfrom(fd, to, len, flags);
    send(fd, from, len, flags) = SYS_sendto(fd, from, len, flags);
    recvfrom(fd, to, len, flags, address, room) = SYS_recvfrom(fd, to, len, flags, address, room);
    sendto(fd, from, len, flags, address, room) = SYS_sendto(fd, from, len, flags, address, room);
    recvmsg(fd, message, flags) = SYS_recvmsg(fd, message, flags);
    sendmsg(fd, message, flags) = SYS_sendmsg(fd, message, flags);
    recvmmsg(fd, messages, count, flags, time) = SYS_recvmmsg(fd, messages, count, flags, time);
    sendmmsg(fd, messages, count, flags) = SYS_sendmmsg(fd, messages, count, flags);
    sendfile(out, from, offset, count) = SYS_sendfile(out, from, offset, count);
    splice(from, from_offset, to, to_offset, len, flags) = SYS_splice(from, from_offset, to, to_offset, len, flags);
    poll(list, count, time) = SYS_poll(list, count, time);
    select(count, read, write, except, time) = SYS_select(count, read, write, except, time);
    epoll_create(size) = SYS_epoll_create(size);
    epoll_create1(flags) = SYS_epoll_create1(flags);
    epoll_ctl(epoll, operation, fd, event) = SYS_epoll_ctl(epoll, operation, fd, event);
    epoll_wait(epoll, events, most, time) = SYS_epoll_wait(epoll, events, most, time);
    epoll_pwait(epoll, events, most, time, mask) = SYS_epoll_pwait(epoll, events, most, time, mask, MASK);
    epoll_pwait2(epoll, events, most, time, mask) = SYS_epoll_pwait2(epoll, events, most, time, mask, MASK);
    munmap(address, len) = SYS_munmap(address, len);
    mlockall(flags) = SYS_mlockall(flags);
    mprotect(address, len, access) = SYS_mprotect(address, len, access);
    sigprocmask(how, set, old) = SYS_rt_sigprocmask(how, set, old, MASK);
    execve(path, arguments, environment) = SYS_execve(path, arguments, environment);
    execveat(directory, path, arguments, environment, flags) = SYS_execveat(directory, path, arguments, environment, flags);
}

/// Fills the arguments up to six.
fn six<const COUNT: usize>(given: [c_long; COUNT]) -> [c_long; 6] {
    std::array::from_fn(|index| given.get(index).copied().unwrap_or(0))
}

/// Makes a system call, and returns the kernel's result.
///
/// # Safety
/// As the system call.
#[inline(always)]
pub(super) unsafe fn call(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> c_long {
    let result;
    // SAFETY: the kernel changes rax, rcx and r11. The rest is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Converts the kernel's result to that of a C function, with errno.
#[inline(always)]
fn returned(result: c_long) -> c_long {
    if (-4095..0).contains(&result) {
        crate::base::errno::set(-result as c_int);
        return -1;
    }
    result
}

unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    // SAFETY: the caller's promise.
    returned(unsafe { call(number, [a, b, c, d, e, f]) })
}

/// Calls ppoll with a copy of the timeout, because the kernel stores the remaining time.
unsafe extern "C" fn ppoll(list: c_long, count: c_long, time: *const timespec, mask: c_long) -> c_long {
    // SAFETY: the caller's promise: null or valid.
    let mut copy = unsafe { time.as_ref() }.copied();
    let time = copy.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: the caller's promise.
    returned(unsafe { call(libc::SYS_ppoll, [list, count, time as c_long, mask, MASK, 0]) })
}

unsafe extern "C" fn pselect(
    count: c_long,
    read: c_long,
    write: c_long,
    except: c_long,
    time: *const timespec,
    mask: c_long,
) -> c_long {
    // SAFETY: the caller's promise: null or valid.
    let mut copy = unsafe { time.as_ref() }.copied();
    let time = copy.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let mask = [mask, MASK];
    // SAFETY: the caller's promise.
    returned(unsafe {
        call(libc::SYS_pselect6, [count, read, write, except, time as c_long, mask.as_ptr() as c_long])
    })
}

/// Calls rt_sigaction. libc's structure has the fields of the kernel's. The restorer is the
/// program's own.
unsafe extern "C" fn sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_long {
    #[repr(C)]
    struct KernelAction {
        handler: usize,
        flags: c_ulong,
        restorer: Option<extern "C" fn()>,
        mask: u64,
    }
    // SAFETY: the caller's promise: null or valid.
    let given = unsafe { action.as_ref() }.map(|action| KernelAction {
        handler: action.sa_sigaction,
        flags: c_ulong::from(action.sa_flags as u32),
        restorer: action.sa_restorer,
        // SAFETY: a set is longer than a word, and aligned.
        mask: unsafe { std::ptr::from_ref(&action.sa_mask).cast::<u64>().read() },
    });
    let mut replaced = KernelAction { handler: 0, flags: 0, restorer: None, mask: 0 };
    let given = given.as_ref().map_or(0, |given| std::ptr::from_ref(given) as c_long);
    let into = std::ptr::from_mut(&mut replaced) as c_long;
    // SAFETY: two local structures. The handler is the program's.
    let result = returned(unsafe { call(libc::SYS_rt_sigaction, [signal.into(), given, into, MASK, 0, 0]) });
    // SAFETY: the caller's promise: null or valid.
    let old = unsafe { old.as_mut() }.filter(|_| result == 0);
    if let Some(old) = old {
        old.sa_sigaction = replaced.handler;
        old.sa_flags = replaced.flags as c_int;
        old.sa_restorer = replaced.restorer;
        // SAFETY: as above.
        unsafe { std::ptr::from_mut(&mut old.sa_mask).cast::<u64>().write(replaced.mask) };
    }
    result
}

extern "C" fn nothing() -> c_long {
    0
}

/// Returns the kernel's first real-time signal.
extern "C" fn first_of_real_time() -> c_int {
    32
}

unsafe extern "C" fn sigfillset(set: *mut u64) -> c_int {
    // SAFETY: the caller's set.
    unsafe { set.write(u64::MAX) };
    0
}

unsafe extern "C" fn sigaddset(set: *mut u64, signal: c_int) -> c_int {
    // SAFETY: the caller's set.
    unsafe { *set |= 1 << (signal - 1) };
    0
}

unsafe extern "C" fn sigismember(set: *const u64, signal: c_int) -> c_int {
    // SAFETY: the caller's set.
    unsafe { (*set >> (signal - 1) & 1) as c_int }
}

unsafe extern "C" fn getauxval(kind: c_ulong) -> c_ulong {
    const END: c_ulong = 0;
    let mut at = TOLD.load(Relaxed);
    // SAFETY: the kernel's list ends with `END`.
    unsafe {
        loop {
            match *at {
                [found, value] if found == kind => return value,
                [END, _] => return 0,
                _ => at = at.add(1),
            }
        }
    }
}

unsafe extern "C" fn getenv(name: *const c_char) -> *const c_char {
    let mut at = ENVIRONMENT.load(Relaxed);
    // SAFETY: the kernel's list, which ends in a null, and the caller's name.
    unsafe {
        let name = CStr::from_ptr(name).to_bytes();
        while !(*at).is_null() {
            let value =
                CStr::from_ptr(*at).to_bytes().strip_prefix(name).and_then(|rest| rest.strip_prefix(b"="));
            if let Some(value) = value {
                return value.as_ptr().cast();
            }
            at = at.add(1);
        }
    }
    std::ptr::null()
}

unsafe extern "C" fn dlsym(_: *mut c_void, name: *const c_char) -> *const c_void {
    // SAFETY: the caller's name, and those of the list, which end in a zero.
    let is_it = |function: &&Function| unsafe {
        CStr::from_ptr(std::ptr::from_ref(function.name).cast()) == CStr::from_ptr(name)
    };
    FUNCTIONS.iter().find(is_it).map_or(std::ptr::null(), |function| function.at as *const c_void)
}

/// Stands for a function that is never called in such a program.
extern "C" fn missing() -> ! {
    abort()
}

extern "C" fn abort() -> ! {
    let (unblock, set) = (libc::SIG_UNBLOCK, 1_u64 << (libc::SIGABRT - 1));
    // SAFETY: a local set. The process ends here.
    unsafe {
        call(libc::SYS_rt_sigprocmask, [unblock.into(), std::ptr::from_ref(&set) as c_long, 0, MASK, 0, 0]);
        let process = call(libc::SYS_getpid, [0; 6]);
        let thread = call(libc::SYS_gettid, [0; 6]);
        call(libc::SYS_tgkill, [process, thread, libc::SIGABRT.into(), 0, 0, 0]);
        loop {
            // The program's handler of SIGABRT has returned.
            asm!("ud2");
        }
    }
}

#[unsafe(naked)]
unsafe extern "C" fn errno_location() {
    naked_asm!("mov rax, gs:[0]", "add rax, {errno}", "ret", errno = const offset_of!(Control, errno))
}

// In assembly, because the compiler would turn Rust versions into calls of themselves.

#[unsafe(naked)]
unsafe extern "C" fn memcpy() {
    naked_asm!(
        "mov rax, rdi",
        "cmp rdx, 16",
        "jb 3f",
        "cmp rdx, 256",
        "ja 5f",
        // Copies whole blocks of 16 bytes, and the last 16 bytes, which may overlap them.
        "movups xmm1, [rsi + rdx - 16]",
        "lea r8, [rdi + rdx - 16]",
        "2:",
        "movups xmm0, [rsi]",
        "movups [rdi], xmm0",
        "add rsi, 16",
        "add rdi, 16",
        "cmp rdi, r8",
        "jb 2b",
        "movups [r8], xmm1",
        "ret",
        "3:",
        "cmp edx, 8",
        "jb 4f",
        "mov rcx, [rsi]",
        "mov r8, [rsi + rdx - 8]",
        "mov [rdi], rcx",
        "mov [rdi + rdx - 8], r8",
        "ret",
        "4:",
        "cmp edx, 4",
        "jb 5f",
        "mov ecx, [rsi]",
        "mov r8d, [rsi + rdx - 4]",
        "mov [rdi], ecx",
        "mov [rdi + rdx - 4], r8d",
        "ret",
        "5:",
        "mov rcx, rdx",
        "rep movsb",
        "ret",
    )
}

#[unsafe(naked)]
unsafe extern "C" fn memmove() {
    naked_asm!(
        // Forward, unless that would overwrite bytes before they are moved.
        "mov rax, rdi",
        "mov rcx, rdi",
        "sub rcx, rsi",
        "cmp rcx, rdx",
        "jb 2f",
        "mov rcx, rdx",
        "rep movsb",
        "ret",
        "2:",
        "lea rdi, [rdi + rdx - 1]",
        "lea rsi, [rsi + rdx - 1]",
        "mov rcx, rdx",
        "std",
        "rep movsb",
        "cld",
        "ret",
    )
}

#[unsafe(naked)]
unsafe extern "C" fn memset() {
    naked_asm!("mov r8, rdi", "mov eax, esi", "mov rcx, rdx", "rep stosb", "mov rax, r8", "ret")
}

#[unsafe(naked)]
unsafe extern "C" fn bcmp() {
    naked_asm!("xor eax, eax", "mov rcx, rdx", "cmp eax, eax", "repe cmpsb", "setne al", "ret")
}

#[unsafe(naked)]
unsafe extern "C" fn strlen() {
    naked_asm!(
        "mov rax, rdi",
        "2:",
        "cmp byte ptr [rax], 0",
        "je 3f",
        "inc rax",
        "jmp 2b",
        "3:",
        "sub rax, rdi",
        "ret"
    )
}
