//! The memory of each thread in a program without libc: a stack, the state of
//! `crate::base::thread`, and the [`Control`] that GS points to. A thread gets such a block at its
//! first call, and another thread reuses the block later.
//!
//! A block is found by the thread pointer, which is unique among living threads. If the program has
//! changed the thread pointer, the block is found by the thread id.

use std::arch::asm;
use std::mem::offset_of;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::thread::gettid;
use shunt_abi::intercept::{BLOCK, Begin, CONTROL, Control};

use crate::base::thread_end;

/// Capacity: more threads than a Go process may have.
const MOST: usize = 16 * 1024;

/// Every block that has ever been in use. None is unmapped.
static BLOCKS: [AtomicPtr<Control>; MOST] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST];
/// Number of blocks.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Number of blocks at which the next search for ended threads is due.
static LOOK_AT: AtomicUsize = AtomicUsize::new(FEW);
const FEW: usize = 32;

/// The initial image of a thread's own data: its address, its length in the file (`IN_FILE`), and
/// its whole length (`LEN`).
static DATA: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static IN_FILE: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
/// 1 if calls are answered on the block's stack, else 0.
static SWITCHES: AtomicU32 = AtomicU32::new(0);

/// Registers the block of the first thread, which is in use already.
pub(super) fn start(told: &Begin) {
    DATA.store(told.own_data.cast_mut(), Relaxed);
    IN_FILE.store(told.own_data_in_file, Relaxed);
    LEN.store(told.own_data_len, Relaxed);
    SWITCHES.store(told.switches_stacks.into(), Relaxed);
    let control = present();
    settle(control, thread_pointer());
    enter(control);
}

/// Returns the value for GS of this thread, which is running in the middle of a fresh `block`: the
/// `Control` of that block, or of one that the thread has already.
pub(super) unsafe extern "C" fn adopt(block: *mut u8) -> *mut Control {
    let program = thread_pointer();
    if let Some(known) = known(program) {
        return known;
    }
    // SAFETY: the end of the block, which only this thread uses.
    unsafe {
        let control: *mut Control = block.add(BLOCK - CONTROL).cast();
        let len = LEN.load(Relaxed);
        let data = block.add(BLOCK - CONTROL - len);
        std::ptr::copy_nonoverlapping(DATA.load(Relaxed), data, IN_FILE.load(Relaxed));
        (&raw mut (*control).at).write(control);
        settle(control, program);
        enter(control);
        control
    }
}

/// Returns the value for GS of a thread whose current stack has enough room.
pub(super) unsafe extern "C" fn adopt_here() -> *mut Control {
    if let Some(known) = known(thread_pointer()) {
        return known;
    }
    loop {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping. The thread cannot go on without it.
        let block = unsafe { mmap_anonymous(std::ptr::null_mut(), BLOCK, access, MapFlags::PRIVATE) };
        if let Ok(block) = block {
            // SAFETY: the mapping has this length.
            return unsafe { adopt(block.cast()) };
        }
    }
}

/// Updates the blocks in a forked child, which has only one thread, with a new id.
pub(super) fn forked() {
    let own = present();
    for block in all() {
        number_of(block).store(if std::ptr::eq(block, own) { own_number() } else { 0 }, Relaxed);
    }
}

/// Makes a call with the depth of answered calls set to 0, and restores the depth afterwards.
pub(super) fn left(call: impl FnOnce()) {
    // SAFETY: this thread's block.
    let (depth, before) = unsafe {
        let depth = &raw mut (*present()).depth;
        (depth, depth.replace(0))
    };
    call();
    // SAFETY: as above. If a vfork child has called this, its parent sleeps.
    unsafe { depth.write(before) };
}

/// Makes the block this thread's.
fn settle(control: *mut Control, program: usize) {
    // SAFETY: this thread's block, which no other thread writes to.
    unsafe {
        let end = control.cast::<u8>().sub(LEN.load(Relaxed)) as usize & !63;
        (&raw mut (*control).stack).write(end);
        (&raw mut (*control).switches).write(SWITCHES.load(Relaxed));
        (&raw mut (*control).depth).write(0);
        (&raw mut (*control).program).write(program);
    }
    number_of(control).store(own_number(), Release);
}

fn enter(control: *mut Control) {
    let place = COUNT.fetch_add(1, AcqRel);
    if let Some(place) = BLOCKS.get(place) {
        place.store(control, Release);
    }
}

/// Returns the block that this thread has, or takes over from an ended thread.
fn known(program: usize) -> Option<*mut Control> {
    let number = own_number();
    if let Some(own) = all().find(|block| number_of(*block).load(Acquire) == number) {
        // SAFETY: this thread's block.
        unsafe { (&raw mut (*own).program).write(program) };
        return Some(own);
    }
    let is_due = COUNT.load(Relaxed) >= LOOK_AT.load(Relaxed);
    let living = all().filter(|block| {
        let number = number_of(*block);
        let thread = number.load(Acquire);
        if is_due && thread != 0 && is_over(thread) {
            let _ = number.compare_exchange(thread, 0, AcqRel, Relaxed);
        }
        number.load(Relaxed) != 0
    });
    if is_due {
        LOOK_AT.store(FEW.max(2 * living.count()), Relaxed);
    }
    let free = all().find(|block| number_of(*block).compare_exchange(0, number, AcqRel, Relaxed).is_ok())?;
    settle(free, program);
    // SAFETY: the block is this thread's now. `over` returns what the ended thread left, as if that
    // thread called it.
    unsafe {
        let before: usize;
        asm!("rdgsbase {before}", "wrgsbase {free}", before = out(reg) before, free = in(reg) free);
        thread_end::over();
        asm!("wrgsbase {before}", before = in(reg) before);
    }
    Some(free)
}

fn all() -> impl Iterator<Item = *mut Control> {
    let count = COUNT.load(Acquire).min(MOST);
    BLOCKS[..count].iter().map(|block| block.load(Acquire)).filter(|block| !block.is_null())
}

fn number_of(control: *mut Control) -> &'static AtomicU32 {
    // SAFETY: blocks are never unmapped, and other threads use only this word of it.
    unsafe { AtomicU32::from_ptr(&raw mut (*control).thread) }
}

fn own_number() -> u32 {
    gettid().as_raw_nonzero().get() as u32
}

fn is_over(thread: u32) -> bool {
    let process = rustix::process::getpid().as_raw_pid();
    // SAFETY: signal 0 sends nothing.
    let asked = unsafe { super::libc::call(libc::SYS_tgkill, [process.into(), thread.into(), 0, 0, 0, 0]) };
    asked == -i64::from(libc::ESRCH)
}

/// Returns the program's thread pointer.
fn thread_pointer() -> usize {
    let at;
    // SAFETY: calls are intercepted only if the processor and the kernel allow this instruction.
    unsafe { asm!("rdfsbase {at}", at = out(reg) at, options(nomem, nostack, pure)) };
    at
}

/// Returns this thread's block. GS must be set.
pub(super) fn present() -> *mut Control {
    let at;
    // SAFETY: GS points to it.
    unsafe {
        asm!("mov {at}, gs:[{own}]", at = out(reg) at, own = const offset_of!(Control, at), options(nostack, pure, readonly))
    };
    at
}
