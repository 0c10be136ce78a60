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

/// How much code of a program with a libc is looked through for system calls of its own, in bytes. One that has more is left alone.
pub const MOST_CODE: u64 = 8 << 20;

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

/// The two bytes of the `syscall` instruction.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// How many bytes around the two [`has_call`] looks at, before them and behind.
pub const AROUND_CALL: usize = 4;

/// Whether there may be a `syscall` instruction in `code`. Where its bytes are by chance, as a rule they are a part of a distance, whose last
/// byte is 0 or 255: few programs have them in another way, and only those cost a look that is exact.
pub fn has_call(code: &[u8]) -> bool {
    const AT_ONCE: usize = 512;
    let last = code.len().saturating_sub(1);
    (0..last).step_by(AT_ONCE).any(|from| {
        let to = last.min(from + AT_ONCE);
        let pairs = code[from..to].iter().zip(&code[from + 1..=to]);
        // Without a way out, so that many bytes are compared at once.
        let is_there = pairs.fold(0, |any, (first, second)| {
            any | (u8::from(*first == SYSCALL[0]) & u8::from(*second == SYSCALL[1]))
        });
        is_there != 0 && (from..to).any(|at| code[at..].starts_with(&SYSCALL) && may_be_call(code, at))
    })
}

fn may_be_call(code: &[u8], at: usize) -> bool {
    /// rt_sigreturn's number: that call matters to nobody, and libgcc has it as a number that it compares with.
    const RETURNS: [u8; 4] = [15, 0, 0, 0];
    let byte = |at: Option<usize>| at.and_then(|at| code.get(at)).copied();
    let is_last_of_distance = |at: usize| matches!(byte(Some(at)), Some(0 | 0xff));
    let (before, first) = (byte(at.checked_sub(1)), byte(at.checked_sub(2)));
    // Behind a jump's, a call's or a conditional jump's opcode, or what says that a distance from here follows.
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
