//! Structures shared by libshunt.so and the process that loads it into a program without a dynamic
//! linker. Both come from one build.

use std::ffi::{c_char, c_void};
use std::sync::atomic::AtomicPtr;

/// The symbol by which the library exports its [`Offer`].
pub const OFFER: &str = "shunt_intercept";
/// Number of system calls that can have a bit; the kernel has fewer.
pub const NUMBERS: usize = 512;
/// Bytes of the memory of one thread: a guard page, its stack, and at the end the [`Control`] that
/// its thread pointer points to.
pub const BLOCK: usize = 64 * 1024;
/// Bytes at the end of a block for [`Control`].
pub const CONTROL: usize = 256;

/// Most bytes of code of a program with a libc that are searched for its own system calls. A
/// program with more is left alone.
pub const MOST_CODE: u64 = 8 << 20;

/// The address of code with any signature.
pub type Code = unsafe extern "C" fn();

/// The addresses that the library offers to a program without libc.
#[derive(Debug)]
#[repr(C)]
pub struct Offer {
    /// Where the program begins instead, with the address of a [`Begin`] in rbx.
    pub start: Code,
    /// Where a system call is redirected to, with its address in rcx. The code that follows the
    /// call runs afterwards.
    pub called: Code,
    /// The first of the functions that replace those of libc.
    pub functions: &'static Function,
    /// Number of those functions.
    pub count: usize,
    /// A bit for each system call that must be redirected to `called`.
    pub numbers: &'static [u32; NUMBERS / 32],
}

/// A function that replaces one of libc.
#[derive(Debug)]
#[repr(C)]
pub struct Function {
    /// The first byte of its name, which ends with a zero.
    pub name: &'static u8,
    /// Its address.
    pub at: Code,
}

/// The parameters that the library gets when it starts.
#[derive(Debug)]
#[repr(C)]
pub struct Begin {
    /// The program's stack as the kernel has filled it.
    pub stack: *const usize,
    /// The program's entry point.
    pub entry: *const c_void,
    /// The initial values of the thread-local data of each thread.
    pub own_data: *const u8,
    /// Bytes of it that are in the file.
    pub own_data_in_file: usize,
    /// Bytes of it, up to the thread pointer.
    pub own_data_len: usize,
    /// The library's initialisation functions.
    pub first_functions: *const *const c_void,
    /// Number of initialisation functions.
    pub first_functions_count: usize,
    /// Whether calls are answered on a stack of the library, because the program's stacks are
    /// small.
    pub switches_stacks: bool,
    /// The program's environment: the value of `environ` in the library.
    pub environment: *const *const c_char,
    /// The library's own path.
    pub library: *const c_char,
    /// The process that loaded the library, if it is a child of the program; otherwise 0.
    pub beside: usize,
}

/// The structure that a thread pointer of the library points to.
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    /// Its own address.
    pub at: *const Control,
    /// The program's own thread pointer, which identifies the thread.
    pub program: usize,
    /// Number of calls being answered; a signal handler that interrupts a call can make another.
    pub depth: u32,
    /// The thread's id.
    pub thread: u32,
    /// The end of the library's own stack for this thread.
    pub stack: usize,
    /// Whether calls are answered on that stack: 0 or 1.
    pub switches: u32,
    /// errno.
    pub errno: i32,
}

/// The structure below a program that has a libc and its own system calls. GS points to it until
/// the library has started.
#[derive(Debug)]
#[repr(C)]
pub struct Below {
    /// Where the calls are redirected to. At first that code makes them unchanged.
    pub called: AtomicPtr<c_void>,
    /// [`BELOW`].
    pub mark: u64,
    /// Whether calls are answered on a stack of the library: 0 or 1.
    pub switches_stacks: u64,
    /// As in [`Begin`].
    pub beside: u64,
}

/// A value that no other memory at that place has.
pub const BELOW: u64 = u64::from_le_bytes(*b"shunt's ");

/// The two bytes of the `syscall` instruction.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Number of bytes before and behind the two that [`has_call`] checks.
pub const AROUND_CALL: usize = 4;

/// Returns whether `code` may contain a `syscall` instruction.
///
/// Where its two bytes occur by chance, they are usually part of a distance, whose last byte is 0
/// or 255. Few programs contain them otherwise, and only those need an exact analysis.
pub fn has_call(code: &[u8]) -> bool {
    const AT_ONCE: usize = 512;
    let last = code.len().saturating_sub(1);
    (0..last).step_by(AT_ONCE).any(|from| {
        let to = last.min(from + AT_ONCE);
        let pairs = code[from..to].iter().zip(&code[from + 1..=to]);
        // Without an early exit, so that the compiler can compare many bytes with one instruction.
        let is_there = pairs.fold(0, |any, (first, second)| {
            any | (u8::from(*first == SYSCALL[0]) & u8::from(*second == SYSCALL[1]))
        });
        is_there != 0 && (from..to).any(|at| code[at..].starts_with(&SYSCALL) && may_be_call(code, at))
    })
}

fn may_be_call(code: &[u8], at: usize) -> bool {
    /// rt_sigreturn's number. That call does not matter, and libgcc contains it as a value to
    /// compare with.
    const RETURNS: [u8; 4] = [15, 0, 0, 0];
    let byte = |at: Option<usize>| at.and_then(|at| code.get(at)).copied();
    let is_last_of_distance = |at: usize| matches!(byte(Some(at)), Some(0 | 0xff));
    let (before, first) = (byte(at.checked_sub(1)), byte(at.checked_sub(2)));
    // Behind the opcode of a jump, a call or a conditional jump, or behind a ModRM byte that
    // announces a distance from here.
    let begins_distance = before.is_some_and(|byte| {
        matches!(byte, 0xe8 | 0xe9) || byte & 0xc7 == 0x05 || (first == Some(0x0f) && byte & 0xf0 == 0x80)
    });
    let returns = code[..at].ends_with(&RETURNS);
    !(returns || is_last_of_distance(at + 2) || begins_distance && is_last_of_distance(at + 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_found_wherever_it_is() {
        for at in [0, 1, 510, 511, 512, 513, 1500, 1998] {
            let mut code = vec![0x90; 2000];
            assert!(!has_call(&code));
            code[at..at + 2].copy_from_slice(&SYSCALL);
            assert!(has_call(&code), "{at}");
        }
        assert!(!has_call(&[]) && !has_call(&[0x0f]) && has_call(&SYSCALL));
    }

    #[test]
    fn what_is_a_part_of_a_distance_is_none() {
        for (code, expected) in [
            // mov eax, 1; syscall; cmp rax, -4096
            (&[0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff][..], true),
            // lea rax, [rip + 0x50f12]; ret
            (&[0x48, 0x8d, 0x05, 0x12, 0x0f, 0x05, 0, 0xc3], false),
            // jmp to 0x15050f further
            (&[0xe9, 0x0f, 0x05, 0x15, 0, 0xcc], false),
            // je to 0x1efaf1 before
            (&[0x0f, 0x84, 0x0f, 0x05, 0xe1, 0xff, 0x48], false),
            // movabs rax, 0x50f0000000fc0c7; ret
            (&[0x48, 0xb8, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05, 0xc3], false),
            // mov ecx, ebp; syscall; ret
            (&[0x89, 0xe9, 0x0f, 0x05, 0xc3, 0x90], true),
        ] {
            assert_eq!(has_call(code), expected, "{code:02x?}");
        }
    }
}
