//! The census of code: it judges each executable mapping of the process once, before any connection
//! is offered (L11).
//!
//! A process without connections is never examined. Before the first offer, the census reads
//! `/proc/self/maps`. `shunt_census` then judges each executable mapping that has not been judged,
//! unless it is *covered*: the shim intercepts its system calls. Covered code is the shim itself,
//! libc and the dynamic linker of the program's namespace, the kernel's vdso, liburing, whose
//! functions have hooks, and code whose calls `shunt_intercept` has redirected to the shim. A
//! second libc is not covered.
//!
//! [`known`] lists objects by name about which the shim knows more than their code shows.
//!
//! ```text
//! Unjudged --- census: all code is clean ---> Clean --- a load, or new code ---> Unjudged
//!     |                                        |
//!     +---- code that may make system calls ---+---> MayBypass (on TCP for good)
//! ```
//!
//! Example: a program loads a plugin with an inline `syscall` instruction for `read`. Before the
//! load, every connection falls back to TCP ([`loads`]). At the next offer, the census finds the
//! new mapping and the instruction. The state becomes `MayBypass`, and the process stays on TCP.

pub(crate) mod bindings;
mod known;
pub(crate) mod lookups;
mod maps;
mod source;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::thread::{Timespec, nanosleep};
use shunt_abi::intercept::NUMBERS;
use shunt_abi::reason::Reason;
use shunt_census::{Frames, Memory, Numbers, Verdict};
use shunt_sys::memory;

use crate::base::code::{self, Code};
use crate::base::library::{Library, each_library, times_added};
use crate::base::lock::{AcrossFork, Guard, Lock};
use crate::base::rank;
use crate::base::signal::Shield;
use crate::base::{errno, process};
use crate::life::{loads, untracked};
use bindings::Bound;
use maps::{Lines, Mapping};

static KNOWN: Lock<Known, { rank::CENSUS }> = Lock::new(Known { judged: Vec::new(), plain: None });
/// A bit for each system call that matters.
static CALLS: Lock<[u32; NUMBERS / 32], { rank::CALL_NUMBERS }> = Lock::new([0; NUMBERS / 32]);
/// Set if a code generator is loaded. Memory that is made executable is trusted then, because only
/// the generator writes to it.
static GENERATES: AtomicBool = AtomicBool::new(false);
/// The page below the program, by which `shunt_intercept` has redirected the program's calls to
/// the shim. [`ALL`] means that every call of the process is redirected.
static LED: AtomicUsize = AtomicUsize::new(0);
const ALL: usize = 1;

/// The size of the buffer through which memory is read. [`TEXT`] is the size of the buffer for
/// `/proc/self/maps`.
const BUFFER: usize = 128 * 1024;
const TEXT: usize = 16 * 1024;

struct Known {
    /// The mappings that have been judged.
    judged: Vec<Judged>,
    /// The objects that are certainly not bound deep, once any object may be.
    plain: Option<Vec<bindings::Object>>,
}

/// How often the dynamic linker had added objects when the last census began.
static ADDED: AtomicU64 = AtomicU64::new(0);

/// A mapping that has been judged. Another mapping in its place differs in file or bounds.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Judged {
    from: usize,
    to: usize,
    inode: u64,
}

/// The result of a census.
enum Found {
    Clean,
    /// Code at this address may make system calls that the shim does not see. 0 if it is unknown
    /// which code.
    MayBypass(usize),
    /// The mappings cannot be read now.
    Nothing,
}

/// Sets which system calls matter, because the shim must see them.
pub(crate) fn start(numbers: &[u32; NUMBERS / 32]) {
    /// Calls that end a thread or release memory do not affect connections.
    const HARMLESS: [i64; 2] = [libc::SYS_exit, libc::SYS_munmap];
    let mut calls = *numbers;
    for number in HARMLESS {
        calls[number as usize / 32] &= !(1 << (number % 32));
    }
    let _shield = Shield::raise();
    CALLS.set(calls);
}

/// Records that the program's own calls have been redirected to the shim by the page `below` it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn program_is_led(below: usize) {
    LED.store(below, Relaxed);
}

/// Records that every call of the process has been redirected to the shim.
#[cfg(target_arch = "x86_64")]
pub(crate) fn all_is_led() {
    LED.store(ALL, Relaxed);
}

/// Judges all code that has not been judged. Returns whether all code is clean. The caller holds no
/// lock.
pub(crate) fn settle() -> bool {
    let has_linker = LED.load(Relaxed) != ALL;
    if code::is_clean() && has_linker && times_added() != ADDED.load(Relaxed) {
        // libc itself has added them: it loads modules for name services and character sets.
        loads::withdraw();
    }
    let state = code::state();
    match state {
        Code::Clean(_) => return true,
        Code::MayBypass => return false,
        // The code is judged when the load has ended.
        Code::Unjudged(_) if code::is_loading() => return false,
        Code::Unjudged(_) => {}
    }
    let before = errno::get();
    let shield = Shield::raise();
    let Some(mut known) = lock() else { return code::is_clean() };
    let found = match () {
        // Another thread may have judged the code meanwhile.
        () if code::state() != state => Found::Nothing,
        () => match known.rebind(has_linker) {
            Bound::NotYet => Found::Nothing,
            // The operator vouches for all system calls of the program (`--own-calls trust`).
            _ if process::trusts_own_calls() => Found::Clean,
            Bound::Here => known.look(),
            Bound::Unclear(at) => Found::MayBypass(at),
        },
    };
    drop(known);
    drop(shield);
    match found {
        Found::Clean => code::settle(state),
        Found::MayBypass(at) => {
            code::give_up(at);
            untracked::leave(Reason::OwnCalls);
        }
        Found::Nothing => {}
    }
    errno::set(before);
    code::is_clean()
}

/// Waits for the census of another thread, with a time limit. That thread may wait for a lock of
/// the dynamic linker that this thread holds.
fn lock() -> Option<Guard<'static, Known, { rank::CENSUS }>> {
    const TRIES: u32 = 1000;
    let pause = Timespec { tv_sec: 0, tv_nsec: 200_000 };
    (0..TRIES).find_map(|_| {
        KNOWN.try_lock().or_else(|| {
            let _ = nanosleep(&pause);
            None
        })
    })
}

/// Prepares for the load of a library that is bound to libc before it is bound to the shim.
pub(super) fn expect_deep() {
    lookups::expect_deep();
    let _shield = Shield::raise();
    let mut present = Vec::new();
    bindings::list(&mut present);
    let mut known = KNOWN.lock();
    match &mut known.plain {
        // An object that has been unloaded may be loaded again and then be bound deep.
        Some(plain) => plain.retain(|one| present.contains(one)),
        None => known.plain = Some(present),
    }
}

/// Treats every object as bound past the shim, because the shim has been loaded after all of them.
pub(crate) fn expect_all_deep() {
    lookups::expect_deep();
    let _shield = Shield::raise();
    KNOWN.lock().plain = Some(Vec::new());
}

/// How often the dynamic linker had added objects when all their calls were last redirected to the
/// shim.
static CALLS_LED: AtomicU64 = AtomicU64::new(0);

/// Redirects calls of new libraries that the dynamic linker has bound past the shim, so that the
/// shim sees their sockets before the first offer. A census judges the calls that cannot be
/// redirected.
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

/// Returns whether the object was loaded with or after a library that is bound deep. In doubt it
/// returns `true`.
fn is_perhaps_deep(object: bindings::Object) -> bool {
    let _shield = Shield::raise();
    lock().is_none_or(|known| known.plain.as_ref().is_some_and(|plain| !plain.contains(&object)))
}

/// Returns the lock of the judgements: no thread is in the middle of a census during a fork.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &KNOWN
}

/// Frees the lock in a child of a fork that the shim did not see. A thread of the parent may have
/// been in the middle of a census.
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
    /// Redirects all calls to the hooks. If every system call is redirected anyway, the process may
    /// have no dynamic linker.
    fn rebind(&self, has_linker: bool) -> Bound {
        if !has_linker {
            return Bound::Here;
        }
        ADDED.store(times_added(), Relaxed);
        bindings::rebind(self.plain.as_deref())
    }

    fn look(&mut self) -> Found {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: new memory, in a place that the kernel chooses.
        let Ok(scratch) = (unsafe {
            mmap_anonymous(std::ptr::null_mut(), BUFFER + TEXT, ProtFlags::READ | ProtFlags::WRITE, flags)
        }) else {
            return Found::Nothing;
        };
        // SAFETY: mapped above, and used by no other thread.
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
        let mut may_bypass = None;
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
                Verdict::MayBypass(at) => may_bypass = may_bypass.or(Some(at as usize)),
            }
        }
        if !lines.is_whole() {
            return Found::Nothing;
        }
        GENERATES.store(generates, Relaxed);
        for (one, is_writable) in anonymous {
            if !generates && (is_writable || has_calls(one.from..one.to, &numbers, buffer)) {
                may_bypass = may_bypass.or(Some(one.from));
            }
        }
        may_bypass.map_or(Found::Clean, Found::MayBypass)
    }
}

impl Known {
    /// Judges the objects that the dynamic linker has loaded, if there is no /proc. Other
    /// executable memory is known only if a hook has seen it.
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
            if let Verdict::MayBypass(at) = judge(mapping, &numbers, buffer) {
                return Found::MayBypass(at as usize);
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
    let is_data = |address| source::is_data(mapping, &Process, address);
    shunt_census::judge(&Process, range, frames.as_ref(), &Numbers(numbers), is_data, buffer)
}

fn has_calls(range: std::ops::Range<usize>, numbers: &[u32; NUMBERS / 32], buffer: &mut [u8]) -> bool {
    let range = range.start as u64..range.end as u64;
    shunt_census::judge(&Process, range, None, &Numbers(numbers), |_| false, buffer) != Verdict::Clean
}

/// The memory of this process, which another thread may unmap at any time.
struct Process;

impl Memory for Process {
    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        memory::copy(address as usize, into)
    }
}

/// The objects whose system calls the shim intercepts.
struct Covered {
    /// Addresses in the shim and in libc.
    addresses: [usize; 2],
    /// The start of the dynamic linker.
    linker: usize,
    /// An address in the program, if its calls have been redirected, and the page below the
    /// program.
    program: usize,
    below: usize,
    is_all: bool,
}

impl Covered {
    fn find() -> Covered {
        // SAFETY: only reads values.
        let [base, entry] =
            [libc::AT_BASE, libc::AT_ENTRY].map(|kind| unsafe { libc::getauxval(kind) as usize });
        let led = LED.load(Relaxed);
        Covered {
            addresses: [settle as *const () as usize, libc::__errno_location as *const () as usize],
            // A dynamic linker that was started as a command is the program.
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
            // The page with the redirecting code follows the page that contains its target.
            || self.below > ALL && has(self.below + PAGE)
            || known::is_covered(mapping.name())
    }
}

const PAGE: usize = 4096;

/// Judges a `range` that the process has made executable, or is about to. Returns whether it has
/// been judged, or need not be. Otherwise the caller must call [`code_has_come`] once the code is
/// there.
pub(crate) fn made_executable(range: std::ops::Range<usize>, is_writable: bool) -> bool {
    let is_trusted = process::trusts_own_calls() || GENERATES.load(Relaxed);
    if process::is_off() || !process::is_home() || is_trusted {
        return true;
    }
    match code::state() {
        Code::Clean(_) => {}
        // No connection is on shared memory, and the next census will find the range.
        Code::Unjudged(_) => return false,
        Code::MayBypass => return true,
    }
    let before = errno::get();
    let start = range.start;
    let may_bypass = is_writable || {
        let _shield = Shield::raise();
        let numbers = *CALLS.lock();
        let mut buffer = [0; 1024];
        has_calls(range, &numbers, &mut buffer)
    };
    if may_bypass {
        code::give_up(start);
        untracked::leave(Reason::OwnCalls);
    }
    errno::set(before);
    true
}

/// Returns whether a census has judged an executable mapping at this address. In doubt it returns
/// `true`. A process that has not been examined has none.
pub(crate) fn is_judged(address: usize) -> bool {
    if process::is_off() || !process::is_home() || code::state() == Code::MayBypass {
        return false;
    }
    let _shield = Shield::raise();
    let has = |one: &Judged| (one.from..one.to).contains(&address);
    KNOWN.try_lock().is_none_or(|known| known.judged.iter().any(has))
}

/// Notes that code has appeared which a concurrent census may have missed.
pub(crate) fn code_has_come() {
    match code::is_clean() {
        true => loads::withdraw(),
        false => code::disturb(),
    }
}
