//! Calls past the shim: by code that no preloaded library can intercept.
//!
//! None of that code is in the actor's executable. It becomes executable when an actor gets the
//! order to `load` it, or when it first waits past libc, while connections may be on shared memory.
//! From then on, half of the calls that can go either way go past the shim.

use super::calls::Answer;
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};

/// The ways in which code that calls the kernel past the shim comes into the actor.
pub const PAST_WAYS: &[&str] = &["mapped", "writable", "library", "deepbind", "namespace"];

/// Environment variable of actors: the directory of the libraries.
pub const PLUGINS: &str = "SHUNT_DIFFERENTIAL_PLUGINS";
/// A library that contains the system call instruction.
pub const INLINE: &str = "inline.so";
/// A library that calls libc's functions.
pub const FUNCTIONS: &str = "functions.so";

/// A function that makes a system call: it returns the kernel's result, errors as negative numbers.
type Call = unsafe extern "C" fn(number: i64, arguments: *const usize) -> i64;

/// The current function; null as long as nothing has been loaded.
static CALL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// Number of calls with two ways, since code past the shim was loaded.
static TURN: AtomicU32 = AtomicU32::new(0);
/// Set once an actor has got an order to load code.
static TAKES_TURNS: AtomicU32 = AtomicU32::new(0);

/// Loads code that calls the kernel past the shim, and uses it from now on.
pub(super) fn load(way: &str) -> Answer {
    let call = match way {
        // A program without a dynamic linker has no other way.
        _ if cfg!(target_feature = "crt-static") => mapped(false),
        "library" => library(INLINE, Binding::Usual),
        "deepbind" => library(FUNCTIONS, Binding::Deep),
        "namespace" => library(FUNCTIONS, Binding::Apart),
        way => mapped(way == "writable"),
    };
    CALL.store(call.unwrap_or(null_mut()), Release);
    TAKES_TURNS.store(1, Release);
    Answer { ret: i64::from(call.is_some()), ..Answer::default() }
}

/// Makes a system call past the shim.
///
/// # Safety
/// As the call demands.
pub(super) unsafe fn call(number: i64, arguments: [usize; 6]) -> i64 {
    let mut way = CALL.load(Acquire);
    if way.is_null() {
        way = mapped(false).expect("memory for a few instructions");
        CALL.store(way, Release);
    }
    // SAFETY: every function stored there has this prototype; the caller promises the rest.
    unsafe { std::mem::transmute::<*mut c_void, Call>(way)(number, arguments.as_ptr()) }
}

/// Makes a call that can go two ways: by libc, or past the shim. After an order to load code, every
/// second call goes past the shim. Returns the result of libc's function, and sets errno as that
/// does.
///
/// # Safety
/// As the call demands.
pub(super) unsafe fn either(by_libc: impl FnOnce() -> i64, number: i64, arguments: [usize; 6]) -> i64 {
    if TAKES_TURNS.load(Relaxed) == 0 || TURN.fetch_add(1, Relaxed).is_multiple_of(2) {
        return by_libc();
    }
    // SAFETY: the caller's promise.
    let ret = unsafe { call(number, arguments) };
    if ret >= 0 {
        return ret;
    }
    // SAFETY: this thread's errno.
    unsafe { *libc::__errno_location() = -ret as c_int };
    -1
}

/// `mov rax, rdi; mov rdi, [rsi]; mov rdx, [rsi+16]; mov r10, [rsi+24]; mov r8, [rsi+32]; mov r9, [rsi+40];
/// mov rsi, [rsi+8]; syscall; ret`
#[cfg(target_arch = "x86_64")]
const CODE: &[u8] = &[
    0x48, 0x89, 0xf8, 0x48, 0x8b, 0x3e, 0x48, 0x8b, 0x56, 0x10, 0x4c, 0x8b, 0x56, 0x18, 0x4c, 0x8b, 0x46,
    0x20, 0x4c, 0x8b, 0x4e, 0x28, 0x48, 0x8b, 0x76, 0x08, 0x0f, 0x05, 0xc3,
];
/// `mov x8, x0; mov x9, x1; ldp x0, x1, [x9]; ldp x2, x3, [x9, #16]; ldp x4, x5, [x9, #32]; svc #0; ret`
#[cfg(target_arch = "aarch64")]
const CODE: &[u8] = &[
    0xe8, 0x03, 0x00, 0xaa, 0xe9, 0x03, 0x01, 0xaa, 0x20, 0x05, 0x40, 0xa9, 0x22, 0x0d, 0x41, 0xa9, 0x24,
    0x15, 0x42, 0xa9, 0x01, 0x00, 0x00, 0xd4, 0xc0, 0x03, 0x5f, 0xd6,
];

/// Returns a copy of the code in new memory, which stays writable or not.
fn mapped(stays_writable: bool) -> Option<*mut c_void> {
    let (read, write, run) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
    let first = if stays_writable { read | write | run } else { read | write };
    // SAFETY: new memory, at least as long as the code; no other code has its address.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(null_mut(), 4096, first, flags, -1, 0);
        if page == libc::MAP_FAILED {
            return None;
        }
        page.cast::<u8>().copy_from_nonoverlapping(CODE.as_ptr(), CODE.len());
        // The processor has no stale instructions of new memory; this makes the copy visible to it.
        #[cfg(target_arch = "aarch64")]
        std::arch::asm!("dsb ish", "ic iallu", "dsb ish", "isb");
        (stays_writable || libc::mprotect(page, 4096, read | run) == 0).then_some(page)
    }
}

/// The way in which a library's symbols are bound.
#[derive(Clone, Copy)]
enum Binding {
    Usual,
    Deep,
    /// In a namespace with its own libc.
    Apart,
}

#[cfg(not(target_env = "musl"))]
fn library(name: &str, binding: Binding) -> Option<*mut c_void> {
    let path = std::env::var_os(PLUGINS).map(|dir| Path::new(&dir).join(name))?;
    let path = CString::new(path.into_os_string().into_encoded_bytes()).ok()?;
    let symbol: &CStr = c"past_call";
    // SAFETY: plain calls with strings that outlive them.
    unsafe {
        let handle = match binding {
            Binding::Usual => libc::dlopen(path.as_ptr(), libc::RTLD_NOW),
            Binding::Deep => libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_DEEPBIND),
            Binding::Apart => libc::dlmopen(libc::LM_ID_NEWLM, path.as_ptr(), libc::RTLD_NOW),
        };
        let found = if handle.is_null() { null_mut() } else { libc::dlsym(handle, symbol.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

/// musl binds all libraries in the same way.
#[cfg(target_env = "musl")]
fn library(_: &str, _: Binding) -> Option<*mut c_void> {
    mapped(false)
}
