//! fork, exec, and other calls that start or change a process. libc's handlers notice ordinary
//! forks, see `crate::fork`.

use std::ffi::{c_char, c_int, c_void};

use libc::{pid_t, uid_t};
use shunt_abi::reason::Reason;

use super::trampoline::{Call, trampolines};
use crate::base::{real, table, thread};
use crate::fork;
use crate::life::untracked;
use crate::ops::exec;
use crate::program::ptrace_helper::{self, By, Executed};
use crate::program::sandbox;

/// See _Fork(3): a fork that runs no handlers.
///
/// # Safety
/// As in C. That holds for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _Fork() -> pid_t {
    // SAFETY: these calls surround every other fork too.
    unsafe { fork::before() };
    // SAFETY: the program's own call.
    let pid = unsafe { real::_Fork() };
    // SAFETY: as above. A forked child has one thread.
    unsafe {
        match pid {
            0 => fork::after_in_child(),
            _ => fork::after_in_parent(),
        }
    }
    if pid < 0 {
        fork::failed();
    }
    pid
}

/// See fork(2). The handlers of `crate::fork` do all work, except if the kernel refuses.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fork() -> pid_t {
    // SAFETY: the program's own call.
    let pid = unsafe { real::fork() };
    if pid < 0 {
        fork::failed();
    }
    pid
}

macro_rules! exec {
    ($($name:ident($($arg:ident: $ty:ty),*) as $executed:expr, $path:expr, $environment:expr;)*) => { $(
        /// See execve(2).
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the program's own call.
            unsafe {
                let beside = ptrace_helper::prepare($executed, $environment, By::Us);
                let _leaving = exec::before_exec($path, $environment);
                let failed = real::$name($($arg),*);
                if beside.is_none() {
                    return failed;
                }
                // The kernel may have refused because the process is traced by the helper. So the
                // program tries again without it.
                drop(beside);
                real::$name($($arg),*)
            }
        }
    )* };
}

type List = *const *const c_char;

unsafe extern "C" {
    static environ: List;
}

/// Stands for a program that is searched for, or named by a descriptor.
const NO_PATH: *const c_char = std::ptr::null();

exec! {
    execve(path: *const c_char, argv: List, envp: List) as Executed::by_path(path), path, envp;
    execv(path: *const c_char, argv: List) as Executed::by_path(path), path, environ;
    execvp(file: *const c_char, argv: List) as Executed::Searched(file), file, environ;
    execvpe(file: *const c_char, argv: List, envp: List) as Executed::Searched(file), file, envp;
    fexecve(fd: c_int, argv: List, envp: List) as Executed::Open(fd), NO_PATH, envp;
    execveat(dir: c_int, path: *const c_char, argv: List, envp: List, flags: c_int) as Executed::from(dir, path, flags), NO_PATH, envp;
}

// Variadic functions, which Rust cannot define. A program that they start gets no handover of
// inherited connections.
trampolines! {
    /// See exec(3).
    execl: before_execl;
    /// See exec(3).
    execlp: before_execlp;
    /// See exec(3).
    execle: before_execle;
}

macro_rules! variadic_exec {
    ($($before:ident: $name:literal;)*) => { $(
        extern "C" fn $before(_: &Call) -> *mut c_void {
            exec::before_variadic_exec();
            real::address!($name)
        }
    )* };
}

variadic_exec! {
    before_execl: "execl";
    before_execlp: "execlp";
    before_execle: "execle";
}

// These calls return twice, or on another stack.
trampolines! {
    /// See vfork(2).
    vfork: before_vfork;
    /// Another name of the function in glibc.
    __vfork: before_vfork;
    /// See clone(2).
    clone: before_clone;
    /// Another name of the function in glibc.
    __clone: before_clone;
}

extern "C" fn before_vfork(_: &Call) -> *mut c_void {
    lending(libc::CLONE_VM | libc::CLONE_VFORK);
    real::address!("vfork")
}

extern "C" fn before_clone(call: &Call) -> *mut c_void {
    lending(call.argument(2) as c_int);
    real::address!("clone")
}

/// Records that a child is about to be made with these flags of clone. A child that is not a thread
/// and runs in this memory must not be mistaken for this process.
pub(super) fn lending(flags: c_int) {
    if flags & (libc::CLONE_VM | libc::CLONE_THREAD) != libc::CLONE_VM {
        return;
    }
    if flags & libc::CLONE_VFORK != 0 {
        // This thread sleeps until the child execs or ends.
        thread::this().is_lent.set(true);
    }
    if flags & (libc::CLONE_VFORK | libc::CLONE_SETTLS) != libc::CLONE_VFORK {
        // The thread goes on meanwhile, or the child has other thread-local storage.
        table::share_memory();
    }
}

trampolines! {
    /// See prctl(2).
    prctl: before_prctl;
}

extern "C" fn before_prctl(call: &Call) -> *mut c_void {
    let [option, mode, filter] = [0, 1, 2].map(|index| call.argument(index));
    controlling(option as c_int, mode, filter);
    real::address!("prctl")
}

/// Handles prctl calls that install a seccomp filter or turn on the strict mode.
pub(super) fn controlling(option: c_int, mode: u64, filter: u64) {
    if option == libc::PR_SET_SECCOMP {
        filtering(mode == libc::SECCOMP_MODE_FILTER.into(), filter);
    }
}

/// Handles seccomp. A call without a filter only asks what the kernel supports.
pub(super) fn filtering(by_filter: bool, filter: u64) {
    if !by_filter || filter != 0 {
        sandbox::before_filter();
    }
}

/// See unshare(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    if flags & libc::CLONE_FILES != 0 {
        untracked::leave(Reason::OwnTable);
    }
    // SAFETY: the program's own call.
    unsafe { real::unshare(flags) }
}

macro_rules! other_user {
    ($($name:ident($($arg:ident),*) becomes $effective:ident;)*) => { $(
        /// Changes the user of the process.
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: uid_t),*) -> c_int {
            exec::before_other_user($effective);
            // SAFETY: the program's own call.
            unsafe { real::$name($($arg),*) }
        }
    )* };
}

other_user! {
    setuid(user) becomes user;
    seteuid(effective) becomes effective;
    setreuid(real, effective) becomes effective;
    setresuid(real, effective, saved) becomes effective;
}

/// See chroot(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn chroot(path: *const c_char) -> c_int {
    exec::before_other_root();
    // SAFETY: the program's own call.
    unsafe { real::chroot(path) }
}

/// Starts another program in a child, inside libc.
///
/// # Safety
/// As posix_spawn.
unsafe fn spawn(executed: Executed, environment: Strings, start: impl Fn() -> c_int) -> c_int {
    exec::before_child();
    // SAFETY: the caller's promise.
    let beside = unsafe { ptrace_helper::prepare(executed, environment.cast(), By::Child) };
    match (start(), beside) {
        (0, Some(beside)) => {
            beside.await_end();
            0
        }
        // The call may have failed because the child was traced, or because there was one process
        // more. So the program tries again without the helper.
        (libc::EAGAIN | libc::ENOMEM | libc::EPERM | libc::EACCES, Some(beside)) => {
            drop(beside);
            start()
        }
        (result, _) => result,
    }
}

/// See posix_spawn(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const Actions,
    attributes: *const Attributes,
    argv: Strings,
    envp: Strings,
) -> c_int {
    // SAFETY: the program's own call.
    unsafe {
        spawn(Executed::by_path(path), envp, || real::posix_spawn(pid, path, actions, attributes, argv, envp))
    }
}

/// See posix_spawnp(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const Actions,
    attributes: *const Attributes,
    argv: Strings,
    envp: Strings,
) -> c_int {
    // SAFETY: the program's own call.
    unsafe {
        spawn(Executed::Searched(file), envp, || {
            real::posix_spawnp(pid, file, actions, attributes, argv, envp)
        })
    }
}

macro_rules! run_command {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => { $(
        /// Starts a shell in a child, inside libc.
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
            exec::before_child();
            // SAFETY: the program's own call.
            unsafe { real::$name($($arg),*) }
        }
    )* };
}

type Actions = libc::posix_spawn_file_actions_t;
type Attributes = libc::posix_spawnattr_t;
type Strings = *const *mut c_char;

run_command! {
    system(command: *const c_char) -> c_int;
    popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE;
}

/// See posix_spawn_file_actions_adddup2(3). A child will get a copy of the descriptor.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut Actions,
    old: c_int,
    new: c_int,
) -> c_int {
    exec::hand_out(old);
    // SAFETY: the program's own call.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, old, new) }
}
