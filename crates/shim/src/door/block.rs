//! The memory of each thread of a program without libc: a stack, what `crate::base::thread` keeps for it, and what GS points to. Taken at the
//! thread's first call, and another thread's when this one is over.
//!
//! A thread is known by its thread pointer, which no other has at the same time, or by its number if it has changed that.

use std::arch::asm;
use std::mem::offset_of;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::thread::gettid;
use shunt_abi::door::{BLOCK, Begin, CONTROL, Control};

use crate::base::end;

/// As many threads as a process of Go's may have, and then some.
const MOST: usize = 16 * 1024;

/// One for each block that has ever been in use. None is given back.
static BLOCKS: [AtomicPtr<Control>; MOST] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST];
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// With how many the next look for threads that are over is due.
static LOOK_AT: AtomicUsize = AtomicUsize::new(FEW);
const FEW: usize = 32;

/// What a thread's own data is at its beginning: where that is, how much of it is in the file, how much there is.
static DATA: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static IN_FILE: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
/// Whether calls are answered on the block's stack: 0 or 1.
static SWITCHES: AtomicU32 = AtomicU32::new(0);

/// The first thread's, which is in use already.
pub(super) fn start(told: &Begin) {
    DATA.store(told.own_data.cast_mut(), Relaxed);
    IN_FILE.store(told.own_data_in_file, Relaxed);
    LEN.store(told.own_data_len, Relaxed);
    SWITCHES.store(told.switches_stacks.into(), Relaxed);
    let control = present();
    settle(control, thread_pointer());
    enter(control);
}

/// What GS is to be for this thread, which runs in the middle of a fresh `block`: that block's, or the one that it has had already.
pub(super) unsafe extern "C" fn adopt(block: *mut u8) -> *mut Control {
    let program = thread_pointer();
    if let Some(known) = known(program) {
        return known;
    }
    // SAFETY: the end of the block, which is this thread's alone.
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

/// The same for a thread that has a stack.
pub(super) unsafe extern "C" fn adopt_here() -> *mut Control {
    if let Some(known) = known(thread_pointer()) {
        return known;
    }
    loop {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping. Without memory for it the thread can do nothing.
        let block = unsafe { mmap_anonymous(std::ptr::null_mut(), BLOCK, access, MapFlags::PRIVATE) };
        if let Ok(block) = block {
            // SAFETY: as large as that.
            return unsafe { adopt(block.cast()) };
        }
    }
}

/// A forked child has one thread, and that another number.
pub(super) fn forked() {
    let own = present();
    for block in all() {
        number_of(block).store(if std::ptr::eq(block, own) { own_number() } else { 0 }, Relaxed);
    }
}

/// Makes a call outside of all that are being answered.
pub(super) fn left(call: impl FnOnce()) {
    // SAFETY: this thread's block.
    let (depth, before) = unsafe {
        let depth = &raw mut (*present()).depth;
        (depth, depth.replace(0))
    };
    call();
    // SAFETY: the same: there is no child but the one that runs here.
    unsafe { depth.write(before) };
}

/// Notes whose it is now.
fn settle(control: *mut Control, program: usize) {
    // SAFETY: this thread's block, which nobody else writes to.
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

/// The block that this thread has, or takes over from one that is over.
fn known(program: usize) -> Option<*mut Control> {
    let number = own_number();
    if let Some(own) = all().find(|block| number_of(*block).load(Acquire) == number) {
        // SAFETY: this thread's own.
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
    // SAFETY: nobody else's any more. What the other thread has left is given back as if by itself.
    unsafe {
        let before: usize;
        asm!("rdgsbase {before}", "wrgsbase {free}", before = out(reg) before, free = in(reg) free);
        end::over();
        asm!("wrgsbase {before}", before = in(reg) before);
    }
    Some(free)
}

fn all() -> impl Iterator<Item = *mut Control> {
    let count = COUNT.load(Acquire).min(MOST);
    BLOCKS[..count].iter().map(|block| block.load(Acquire)).filter(|block| !block.is_null())
}

fn number_of(control: *mut Control) -> &'static AtomicU32 {
    // SAFETY: blocks are never given back, and others look at this word alone.
    unsafe { AtomicU32::from_ptr(&raw mut (*control).thread) }
}

fn own_number() -> u32 {
    gettid().as_raw_nonzero().get() as u32
}

fn is_over(thread: u32) -> bool {
    let process = rustix::process::getpid().as_raw_pid();
    // SAFETY: signal 0 only asks.
    let asked = unsafe { super::libc::call(libc::SYS_tgkill, [process.into(), thread.into(), 0, 0, 0, 0]) };
    asked == -i64::from(libc::ESRCH)
}

/// The program's.
fn thread_pointer() -> usize {
    let at;
    // SAFETY: without it no door is opened.
    unsafe { asm!("rdfsbase {at}", at = out(reg) at, options(nomem, nostack, pure)) };
    at
}

/// This thread's, where GS is right.
pub(super) fn present() -> *mut Control {
    let at;
    // SAFETY: GS points to it.
    unsafe {
        asm!("mov {at}, gs:[{own}]", at = out(reg) at, own = const offset_of!(Control, at), options(nostack, pure, readonly))
    };
    at
}
