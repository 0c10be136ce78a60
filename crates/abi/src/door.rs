//! What libshunt.so and whoever puts it into a program without a dynamic linker must know of each other. Both are of one build.

use std::ffi::{c_char, c_void};
use std::sync::atomic::AtomicPtr;

/// The name by which the library shows its [`Offer`].
pub const OFFER: &str = "shunt_door";
/// System calls that can have a bit: the kernel has fewer.
pub const NUMBERS: usize = 512;
/// The memory of one thread: a page that nobody may touch, its stack, and at the end what its thread pointer points to.
pub const BLOCK: usize = 64 * 1024;
/// The last of it.
pub const CONTROL: usize = 256;

/// Code, whatever it takes and returns.
pub type Code = unsafe extern "C" fn();

/// What the library has for a program without libc.
#[derive(Debug)]
#[repr(C)]
pub struct Offer {
    /// Where the program begins instead, with the address of a [`Begin`] in rbx.
    pub start: Code,
    /// Where a system call is led to, with its address in rcx: what follows it is left to do afterwards.
    pub called: Code,
    /// The functions that stand in for those of libc: the first of them.
    pub functions: &'static Function,
    /// How many.
    pub count: usize,
    /// A bit for each system call that must come here.
    pub numbers: &'static [u32; NUMBERS / 32],
}

/// A function that stands in for one of libc.
#[derive(Debug)]
#[repr(C)]
pub struct Function {
    /// Its name's first byte; there is a zero behind the last.
    pub name: &'static u8,
    /// Where it is.
    pub at: Code,
}

/// What the library is told when it starts.
#[derive(Debug)]
#[repr(C)]
pub struct Begin {
    /// What the kernel has put on the program's stack.
    pub stack: *const usize,
    /// Where the program begins.
    pub entry: *const c_void,
    /// What each thread's own data is at its beginning.
    pub own_data: *const u8,
    /// How much of it there is in the file.
    pub own_data_in_file: usize,
    /// How much of it there is, up to the thread pointer.
    pub own_data_len: usize,
    /// The library's functions that run first.
    pub first_functions: *const *const c_void,
    /// How many.
    pub first_functions_count: usize,
    /// Whether calls are answered on a stack of the library's: the program's stacks are small.
    pub switches_stacks: bool,
    /// The program's environment: what `environ` is in the library.
    pub environment: *const *const c_char,
    /// The library's own path.
    pub library: *const c_char,
    /// The process that has put it there, if that is a child of the program's; else 0.
    pub beside: usize,
}

/// What a thread pointer of the library's points to.
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    /// Itself.
    pub at: *const Control,
    /// The program's own thread pointer, by which the thread is known.
    pub program: usize,
    /// How many calls are being answered, one in a handler that has interrupted the other.
    pub depth: u32,
    /// The thread.
    pub thread: u32,
    /// The end of the library's own stack for this thread.
    pub stack: usize,
    /// Whether calls are answered on that: 0 or 1.
    pub switches: u32,
    /// errno.
    pub errno: i32,
}

/// What is below a program that has a libc and system calls of its own: GS points to it until the library has started.
#[derive(Debug)]
#[repr(C)]
pub struct Below {
    /// Where the calls are led to. At first that makes them as they are.
    pub called: AtomicPtr<c_void>,
    /// [`BELOW`].
    pub mark: u64,
    /// Whether calls are answered on a stack of the library's: 0 or 1.
    pub switches_stacks: u64,
    /// As in [`Begin`].
    pub beside: u64,
}

/// What nothing else has there.
pub const BELOW: u64 = u64::from_le_bytes(*b"shunt's ");
