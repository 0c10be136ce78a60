//! The census of code: judges each executable mapping of the process, once, before anything may be on shared memory (L11).
//!
//! A process without connections is never looked at. The first connection that is about to be offered has `/proc/self/maps` read,
//! and each executable mapping that was not judged before is judged by `shunt_census`, unless it is *covered*: the shim stands in
//! front of its system calls. Covered are the shim itself, libc and the dynamic linker of the program's own namespace, the
//! kernel's vdso, liburing, whose functions have hooks, and what `shunt_door` has led here. A second libc is not.
//!
//! [`known`] names objects of which more is known than their code tells.

mod bindings;
mod known;
pub(crate) mod lookups;
mod maps;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::thread::{Timespec, nanosleep};
use shunt_abi::door::NUMBERS;
use shunt_abi::reason::Reason;
use shunt_census::{Frames, Memory, Numbers, Verdict};
use shunt_sys::memory;

use crate::base::code::{self, Code};
use crate::base::library::{Library, each_library, times_added};
use crate::base::lock::{Guard, Lock};
use crate::base::signal::Shield;
use crate::base::{errno, process};
use crate::life::{loads, unseen};
use bindings::Bound;
use maps::{Lines, Mapping};

static KNOWN: Lock<Known> = Lock::new(Known { judged: Vec::new(), plain: None });
/// A bit for each system call that matters.
static CALLS: Lock<[u32; NUMBERS / 32]> = Lock::new([0; NUMBERS / 32]);
/// A code generator is loaded: memory that it makes executable is its own.
static GENERATES: AtomicBool = AtomicBool::new(false);
/// The page below the program by which `shunt_door` has led its calls here; 1 if all of the process is led.
static LED: AtomicUsize = AtomicUsize::new(0);
const ALL: usize = 1;

/// Bytes of the buffer by way of which memory is read, and of the one for `/proc/self/maps`.
const BUFFER: usize = 128 * 1024;
const TEXT: usize = 16 * 1024;

struct Known {
    /// The mappings that have been judged.
    judged: Vec<Judged>,
    /// The objects that are surely not bound deep, once one may be.
    plain: Option<Vec<bindings::Object>>,
}

/// How often the dynamic linker had added objects when the last census began.
static ADDED: AtomicU64 = AtomicU64::new(0);

/// A mapping that has been judged. Another one in its place has another file or other bounds.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Judged {
    from: usize,
    to: usize,
    inode: u64,
}

/// What a census has found.
enum Found {
    Clean,
    MayBypass,
    /// The mappings cannot be read now.
    Nothing,
}

/// Which system calls matter: those that the shim must see.
pub(crate) fn start(numbers: &[u32; NUMBERS / 32]) {
    /// What ends a thread, or takes memory away, has nothing to do with connections.
    const HARMLESS: [i64; 2] = [libc::SYS_exit, libc::SYS_munmap];
    let mut calls = *numbers;
    for number in HARMLESS {
        calls[number as usize / 32] &= !(1 << (number % 32));
    }
    let _shield = Shield::raise();
    CALLS.set(calls);
}

/// The program's own calls have been led to the shim by way of the page `below` it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn program_is_led(below: usize) {
    LED.store(below, Relaxed);
}

/// Every call of the process has been.
#[cfg(target_arch = "x86_64")]
pub(crate) fn all_is_led() {
    LED.store(ALL, Relaxed);
}

/// Has all code judged that was not. Called outside all locks. Returns whether it is clean.
pub(crate) fn settle() -> bool {
    let has_linker = LED.load(Relaxed) != ALL;
    if code::is_clean() && has_linker && times_added() != ADDED.load(Relaxed) {
        // By libc itself: it loads modules for names and for character sets.
        loads::withdraw();
    }
    let state = code::state();
    match state {
        Code::Clean(_) => return true,
        Code::MayBypass => return false,
        // Judged when it has ended.
        Code::Unjudged(_) if code::is_loading() => return false,
        Code::Unjudged(_) => {}
    }
    let before = errno::get();
    let shield = Shield::raise();
    let Some(mut known) = lock() else { return code::is_clean() };
    let found = match () {
        // Another thread may have looked meanwhile.
        () if code::state() != state => Found::Nothing,
        () => match known.rebind(has_linker) {
            Bound::NotYet => Found::Nothing,
            // Somebody has vouched for all of it.
            _ if process::trusts_own_calls() => Found::Clean,
            Bound::Here => known.look(),
            Bound::Unclear => Found::MayBypass,
        },
    };
    drop(known);
    drop(shield);
    match found {
        Found::Clean => code::settle(state),
        Found::MayBypass => {
            code::give_up();
            unseen::leave(Reason::OwnCalls);
        }
        Found::Nothing => {}
    }
    errno::set(before);
    code::is_clean()
}

/// Waits for a census of another thread's, but not for ever: that one may wait for the dynamic linker, of which this thread may hold a lock.
fn lock() -> Option<Guard<'static, Known>> {
    const TRIES: u32 = 1000;
    let pause = Timespec { tv_sec: 0, tv_nsec: 200_000 };
    (0..TRIES).find_map(|_| {
        KNOWN.try_lock().or_else(|| {
            let _ = nanosleep(&pause);
            None
        })
    })
}

/// A library is about to be loaded that is bound to libc before it is bound to the shim.
pub(super) fn expect_deep() {
    lookups::expect_deep();
    let _shield = Shield::raise();
    let mut present = Vec::new();
    bindings::list(&mut present);
    let mut known = KNOWN.lock();
    match &mut known.plain {
        // One that has gone may come back deep.
        Some(plain) => plain.retain(|one| present.contains(one)),
        None => known.plain = Some(present),
    }
}

/// How often the dynamic linker had added objects when all their calls were last led to the shim.
static CALLS_LED: AtomicU64 = AtomicU64::new(0);

/// Leads calls of new libraries to the shim that the dynamic linker has bound past it, so that the
/// shim sees their sockets before the first offer. A census judges the calls that cannot be led.
pub(super) fn lead_calls() {
    if !lookups::may_be_deep() || LED.load(Relaxed) == ALL || process::is_off() {
        return;
    }
    let added = times_added();
    if added == CALLS_LED.load(Relaxed) || !process::is_home() {
        return;
    }
    let _shield = Shield::raise();
    if let Some(known) = lock()
        && let Some(plain) = &known.plain
        && bindings::rebind_others_than(plain) != Bound::NotYet
    {
        CALLS_LED.store(added, Relaxed);
    }
}

/// Returns whether the object came with or after a library that is bound deep. In doubt it did.
fn is_perhaps_deep(object: bindings::Object) -> bool {
    let _shield = Shield::raise();
    lock().is_none_or(|known| known.plain.as_ref().is_some_and(|plain| !plain.contains(&object)))
}

/// No thread is in the middle of a census while the process is copied.
pub(crate) fn hold_lock() {
    KNOWN.hold();
}

/// In both processes.
///
/// # Safety
/// After [`hold_lock`], on the same thread.
pub(crate) unsafe fn release_lock() {
    // SAFETY: the caller's promise.
    unsafe { KNOWN.release() };
}

/// In a child that nobody announced: a thread of its parent's may have been in the middle of a census.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn reset_lock() {
    // SAFETY: the caller's promise.
    unsafe { KNOWN.reset() };
    std::mem::forget(std::mem::take(&mut KNOWN.lock().judged));
    code::forget_loads();
    code::disturb();
}

impl Known {
    /// Has all calls lead to the hooks. Where every system call does, there may be no dynamic linker.
    fn rebind(&self, has_linker: bool) -> Bound {
        if !has_linker {
            return Bound::Here;
        }
        ADDED.store(times_added(), Relaxed);
        bindings::rebind(self.plain.as_deref())
    }

    fn look(&mut self) -> Found {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: memory of our own, in a place that the kernel chooses.
        let Ok(scratch) = (unsafe {
            mmap_anonymous(std::ptr::null_mut(), BUFFER + TEXT, ProtFlags::READ | ProtFlags::WRITE, flags)
        }) else {
            return Found::Nothing;
        };
        // SAFETY: mapped above, and nobody else's.
        let bytes = unsafe { std::slice::from_raw_parts_mut(scratch.cast::<u8>(), BUFFER + TEXT) };
        let (buffer, text) = bytes.split_at_mut(BUFFER);
        let found = self.look_by(buffer, text);
        // SAFETY: mapped above, and not used any more.
        let _ = unsafe { munmap(scratch, BUFFER + TEXT) };
        found
    }

    fn look_by(&mut self, buffer: &mut [u8], text: &mut [u8]) -> Found {
        let Some(mut lines) = Lines::open(text) else { return self.look_at_objects(buffer) };
        let covered = Covered::find();
        let numbers = *CALLS.lock();
        let mut anonymous = Vec::new();
        let mut generates = false;
        let mut may_bypass = false;
        while let Some(mapping) = lines.next() {
            generates |= known::is_generator(mapping.name());
            if !mapping.is_executable || covered.has(&mapping) {
                continue;
            }
            let judged = Judged { from: mapping.from, to: mapping.to, inode: mapping.inode };
            if self.judged.contains(&judged) {
                continue;
            }
            if mapping.inode == 0 || mapping.is_writable {
                anonymous.push((judged, mapping.is_writable));
                continue;
            }
            match judge(&mapping, &numbers, buffer) {
                Verdict::Clean => self.judged.push(judged),
                Verdict::MayBypass(_) => may_bypass = true,
            }
        }
        if !lines.is_whole() {
            return Found::Nothing;
        }
        GENERATES.store(generates, Relaxed);
        for (one, is_writable) in anonymous {
            if !generates && (is_writable || has_calls(one.from..one.to, &numbers, buffer)) {
                may_bypass = true;
            }
        }
        if may_bypass { Found::MayBypass } else { Found::Clean }
    }
}

impl Known {
    /// Where there is no /proc, the dynamic linker tells of the objects that it has loaded. Of other memory nothing is known that its
    /// hooks have not told.
    fn look_at_objects(&mut self, buffer: &mut [u8]) -> Found {
        let mut objects: Vec<Mapping> = Vec::new();
        each_library(&mut |library| {
            list(library, &mut objects);
            false
        });
        let covered = Covered::find();
        let numbers = *CALLS.lock();
        GENERATES.store(objects.iter().any(|one| known::is_generator(one.name())), Relaxed);
        for mapping in objects.iter().filter(|one| !covered.has(one)) {
            if judge(mapping, &numbers, buffer) != Verdict::Clean {
                return Found::MayBypass;
            }
        }
        if objects.is_empty() { Found::Nothing } else { Found::Clean }
    }
}

/// Lists the executable segments of an object.
fn list(library: &Library<'_>, objects: &mut Vec<Mapping>) {
    let loaded = || library.segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD);
    let at = |address: u64| library.base.wrapping_add(address as usize);
    let object = loaded().map(|segment| at(segment.p_vaddr) & !(PAGE - 1)).min().unwrap_or(0);
    for segment in loaded().filter(|segment| segment.p_flags & libc::PF_X != 0) {
        let from = at(segment.p_vaddr);
        objects.push(Mapping::of_object(
            from..from + segment.p_filesz as usize,
            object,
            library.name.to_bytes(),
        ));
    }
}

fn judge(mapping: &Mapping, numbers: &[u32; NUMBERS / 32], buffer: &mut [u8]) -> Verdict {
    let frames = Frames::of_object(&Process, mapping.object as u64);
    let range = mapping.from as u64..mapping.to as u64;
    shunt_census::judge(&Process, range, frames.as_ref(), &Numbers(numbers), buffer)
}

fn has_calls(range: std::ops::Range<usize>, numbers: &[u32; NUMBERS / 32], buffer: &mut [u8]) -> bool {
    let range = range.start as u64..range.end as u64;
    shunt_census::judge(&Process, range, None, &Numbers(numbers), buffer) != Verdict::Clean
}

/// This process's memory, which another thread may unmap at any time.
struct Process;

impl Memory for Process {
    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        memory::copy(address as usize, into)
    }
}

/// Where the objects are whose system calls come by way of the shim.
struct Covered {
    /// Addresses in the shim and in libc.
    addresses: [usize; 2],
    /// Where the dynamic linker begins.
    linker: usize,
    /// In the program itself, if its calls have been led here, and the page below it.
    program: usize,
    below: usize,
    is_all: bool,
}

impl Covered {
    fn find() -> Covered {
        // SAFETY: only asks.
        let [base, entry] =
            [libc::AT_BASE, libc::AT_ENTRY].map(|kind| unsafe { libc::getauxval(kind) as usize });
        let led = LED.load(Relaxed);
        Covered {
            addresses: [settle as *const () as usize, libc::__errno_location as *const () as usize],
            // A dynamic linker that was started by its name is the program.
            linker: if base == 0 { entry } else { base },
            program: if led > ALL { entry } else { 0 },
            below: led,
            is_all: led == ALL,
        }
    }

    fn has(&self, mapping: &Mapping) -> bool {
        let has = |address: usize| (mapping.from..mapping.to).contains(&address);
        self.is_all
            || self.addresses.into_iter().any(has)
            || mapping.object == self.linker
            || has(self.linker)
            || self.program != 0 && has(self.program)
            // The page with the code that leads there is behind the one that says where.
            || self.below > ALL && has(self.below + PAGE)
            || known::is_covered(mapping.name())
    }
}

const PAGE: usize = 4096;

/// The process has made `range` executable, or is about to. Returns whether that has been judged, or need not be: else [`code_has_come`]
/// is to be called once it is there.
pub(crate) fn made_executable(range: std::ops::Range<usize>, is_writable: bool) -> bool {
    let is_trusted = process::trusts_own_calls() || GENERATES.load(Relaxed);
    if process::is_off() || !process::is_home() || is_trusted {
        return true;
    }
    match code::state() {
        Code::Clean(_) => {}
        // Nothing is shared, and the next census will find it.
        Code::Unjudged(_) => return false,
        Code::MayBypass => return true,
    }
    let before = errno::get();
    let may_bypass = is_writable || {
        let _shield = Shield::raise();
        let numbers = *CALLS.lock();
        let mut buffer = [0; 1024];
        has_calls(range, &numbers, &mut buffer)
    };
    if may_bypass {
        code::give_up();
        unseen::leave(Reason::OwnCalls);
    }
    errno::set(before);
    true
}

/// Code is there that a census may have missed which was under way meanwhile.
pub(crate) fn code_has_come() {
    match code::is_clean() {
        true => loads::withdraw(),
        false => code::disturb(),
    }
}
