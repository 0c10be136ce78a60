//! State of the shim that concerns its whole process: settings, the page, counters, and the
//! broker's board.

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::mem::offset_of;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

use shunt_abi::latency::WANTED;
use shunt_abi::page::{BOARD_BYTES, Board, Counter, ENTRIES, Entry, PAGE_BYTES, Page, Which};
use shunt_abi::reason::Reason;
use shunt_abi::rules;
pub(crate) use shunt_sys::clock::now;
use shunt_sys::mapping::{self, Mapping, Shown};
use shunt_sys::memfd;

use crate::base::lock::{AcrossFork, Lock};
use crate::base::plan::shunt_plan;
use crate::base::rank;

static PAGE: AtomicPtr<Page> = AtomicPtr::new(std::ptr::null_mut());
/// The board of the last broker that accepted this process.
static BOARD: AtomicPtr<Board> = AtomicPtr::new(std::ptr::null_mut());
/// The address of the board, once there has been one. A new board replaces the old mapping there.
static BOARD_PLACE: AtomicPtr<Board> = AtomicPtr::new(std::ptr::null_mut());
static ROWS: Lock<Rows, { rank::ROWS }> = Lock::new(Rows::NONE);
static PID: AtomicI32 = AtomicI32::new(0);
static BROKER_PATHS: OnceLock<Vec<CString>> = OnceLock::new();
static DOOR_PATH: OnceLock<CString> = OnceLock::new();
/// Whether the shim is off. 1: on, 2: off, 0: not determined yet.
static OFF: AtomicU32 = AtomicU32::new(0);
/// See [`end`].
static HAS_ENDED: AtomicBool = AtomicBool::new(false);
static SPIN: AtomicU32 = AtomicU32::new(SPIN_AUTO);
/// See [`is_in_use`].
static IN_USE: AtomicBool = AtomicBool::new(false);
/// Counts from the time before there was a page.
static UNTOLD: [AtomicU64; Counter::COUNT] = [const { AtomicU64::new(0) }; Counter::COUNT];
static OFFERS_AT_ONCE: AtomicBool = AtomicBool::new(false);
static TRUSTS_OWN_CALLS: AtomicBool = AtomicBool::new(false);
/// Number of control messages that have been received from the broker.
pub(crate) static SEEN: AtomicU64 = AtomicU64::new(0);
/// Points to a word that equals [`SEEN`] if a call need check only its own connection. The word is
/// the board's count of messages that the broker has sent, or without a board, `SEEN` itself.
static GATE: AtomicPtr<AtomicU64> = AtomicPtr::new((&raw const SEEN).cast_mut());
/// See [`shut_gate`].
static GATE_IS_SHUT: AtomicBool = AtomicBool::new(false);
/// Differs from every count. It has the bit of a wanted latency.
static NEVER: AtomicU64 = AtomicU64::new(u64::MAX);

const SPIN_AUTO: u32 = u32::MAX;

/// How long `shunt status` shows a connection that has ended.
const SHOWN_NANOS: u64 = 60_000_000_000;
/// How many of them keep their rows for that time.
const SHOWN_ROWS: usize = 64;

struct Rows {
    /// Rows of connections that have ended, the earliest first.
    free: VecDeque<u16>,
    next: u16,
    /// Length of the page's beginning that is backed by memory.
    backed: usize,
}

impl Rows {
    const NONE: Rows = Rows { free: VecDeque::new(), next: 0, backed: 0 };

    /// Returns the earliest free row, if its connection need no longer be shown.
    fn take_old(&mut self, page: &Page) -> Option<u16> {
        let ended_at = page.entries[usize::from(*self.free.front()?)].ended_at.load(Relaxed);
        let is_old = self.free.len() > SHOWN_ROWS || now().saturating_sub(ended_at) > SHOWN_NANOS;
        if is_old { self.free.pop_front() } else { None }
    }

    /// Returns a row that was never used, if there is one and memory for it.
    fn take_new(&mut self, page: &Page) -> Option<u16> {
        let row = self.next;
        if usize::from(row) >= ENTRIES || !self.back_next(page) {
            return None;
        }
        self.next += 1;
        page.rows.store(self.next.into(), Release);
        Some(row)
    }

    /// Backs the next row with memory. Returns `false` if there is none.
    fn back_next(&mut self, page: &Page) -> bool {
        let needed = with_rows(self.next as usize + 1);
        let first = std::ptr::from_ref(page).cast_mut().cast::<u8>().wrapping_add(self.backed);
        if needed > self.backed {
            if mapping::back(first, needed - self.backed).is_err() {
                return false;
            }
            self.backed = needed;
        }
        true
    }
}

/// How a waiter may spin before it sleeps: `shunt run --spin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spin {
    /// For a bounded time, while spinning pays off.
    Auto,
    /// For this time before each sleep. 0 turns spinning off.
    Nanos(u64),
}

/// Reads the settings, before main: some programs clear their environment later.
pub(crate) fn start() {
    PID.store(current_pid(), Relaxed);
    // The first call of `now` finds the clock. On an old kernel it reads files for that, and needs
    // more stack than a thread may have later.
    now();
    let _ = BROKER_PATHS.set(broker_paths_now());
    show_broker_paths();
    if let Some(path) = variable(c"SHUNT_INTERCEPT") {
        let _ = DOOR_PATH.set(path.to_owned());
    }
    OFFERS_AT_ONCE.store(setting(c"SHUNT_OFFER", "offer") == Some(b"at-once"), Relaxed);
    TRUSTS_OWN_CALLS.store(setting(c"SHUNT_OWN_CALLS", "own-calls") == Some(b"trust"), Relaxed);
    if let Some(spin) = setting(c"SHUNT_SPIN", "spin") {
        let micros = match spin {
            b"auto" => SPIN_AUTO,
            b"off" => 0,
            digits => {
                std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok()).unwrap_or(SPIN_AUTO)
            }
        };
        SPIN.store(micros, Relaxed);
    }
}

/// Returns the setting of `--ring-memory`. Called before main.
pub(crate) fn ring_memory() -> Option<&'static [u8]> {
    setting(c"SHUNT_RING_MEMORY", "ring-memory")
}

/// Returns whether the shim is off: by `--transport tcp`, or because the program is in a sandbox
/// (`crate::program::sandbox`). Then it tracks no descriptor, and no hook makes a system call that
/// the program did not ask for.
#[inline]
pub(crate) fn is_off() -> bool {
    match OFF.load(Acquire) {
        0 => determine_off(),
        word => word == 2,
    }
}

#[cold]
#[inline(never)]
fn determine_off() -> bool {
    let off = setting(c"SHUNT_TRANSPORT", "transport") == Some(b"tcp");
    let _ = OFF.compare_exchange(0, 1 + u32::from(off), AcqRel, Relaxed);
    if off {
        shunt_plan.off.store(Reason::Policy as u64, Relaxed);
    }
    off
}

/// Records that the shim is in use. Call it before tracking anything, and before taking a lock that
/// belongs to tracked state.
#[inline]
pub(crate) fn note_use() {
    if !IN_USE.load(Relaxed) {
        IN_USE.store(true, SeqCst);
    }
}

/// Returns whether this process, or one that it was forked from, has ever tracked a descriptor.
/// Until then, nothing is done around a fork, and no memory is written: each write makes the kernel
/// copy a page.
pub(crate) fn is_in_use() -> bool {
    IN_USE.load(SeqCst)
}

/// Turns the shim off: it tracks nothing from now on.
pub(crate) fn turn_off() {
    OFF.store(2, Release);
}

/// Turns the shim off for good, because the program is in a sandbox. Threads may be inside hooks.
pub(crate) fn end() {
    HAS_ENDED.store(true, SeqCst);
    turn_off();
    shunt_plan.off.store(Reason::Sandboxed as u64, Relaxed);
}

/// Returns whether the shim has been turned off for good.
#[inline]
pub(crate) fn has_ended() -> bool {
    HAS_ENDED.load(SeqCst)
}

/// Notes the errno of an attempt to reach a broker, which `shunt explain` reads; 0 for success.
pub(crate) fn note_reached(errno: i32) {
    shunt_plan.unreached.store(errno as u64, Relaxed);
}

/// Notes that a broker has accepted this process, which `shunt explain` reads.
pub(crate) fn note_registered() {
    shunt_plan.registered.store(1, Relaxed);
}

pub(crate) fn spin() -> Spin {
    match SPIN.load(Relaxed) {
        SPIN_AUTO => Spin::Auto,
        micros => Spin::Nanos(u64::from(micros) * 1000),
    }
}

/// Returns whether connections are offered at their first use: `shunt run --offer at-once`.
pub(crate) fn offers_at_once() -> bool {
    OFFERS_AT_ONCE.load(Relaxed)
}

/// Returns whether the operator vouches for the system calls that the program makes past libc:
/// `shunt run --own-calls trust`.
pub(crate) fn trusts_own_calls() -> bool {
    TRUSTS_OWN_CALLS.load(Relaxed)
}

/// Returns the path of the command that enters programs without a dynamic linker, if the
/// environment names it.
pub(crate) fn helper_path() -> Option<&'static CStr> {
    DOOR_PATH.get().map(CString::as_c_str)
}

/// Returns the paths where the broker may listen, best first. Empty before the settings have been
/// read.
pub(crate) fn broker_paths() -> &'static [CString] {
    BROKER_PATHS.get().map_or(&[], Vec::as_slice)
}

/// Shows `shunt explain` where the broker may listen.
fn show_broker_paths() {
    let paths: Vec<u8> = broker_paths().iter().flat_map(|path| path.to_bytes_with_nul()).copied().collect();
    let paths = paths.leak();
    shunt_plan.brokers[0].store(paths.as_ptr().addr() as u64, Relaxed);
    shunt_plan.brokers[1].store(paths.len() as u64, Release);
}

fn broker_paths_now() -> Vec<CString> {
    if let Some(path) = variable(c"SHUNT_BROKER") {
        return vec![path.to_owned()];
    }
    let per_user = variable(c"XDG_RUNTIME_DIR").and_then(|directory| {
        let mut path = directory.to_bytes().to_vec();
        path.extend_from_slice(b"/shunt/broker.sock");
        CString::new(path).ok()
    });
    per_user.into_iter().chain([c"/run/shunt/broker/broker.sock".to_owned()]).collect()
}

/// Returns the path of the program, as it was passed to execve.
pub(crate) fn started_from() -> &'static CStr {
    // SAFETY: the kernel's own string, or null.
    unsafe {
        let path = libc::getauxval(libc::AT_EXECFN) as *const libc::c_char;
        if path.is_null() { c"" } else { CStr::from_ptr(path) }
    }
}

/// Returns the setting `key`: from its environment variable, else from the rules of the
/// configuration.
fn setting(name: &CStr, key: &str) -> Option<&'static [u8]> {
    let own = variable(name).map(CStr::to_bytes);
    own.or_else(|| {
        let program = rules::name_of(started_from().to_bytes());
        rules::value(variable(c"SHUNT_RULES")?.to_bytes(), |name| name == program, key)
    })
}

/// The settings that stand in for the environment of a program that was entered while it ran:
/// strings such as `NAME=value`, behind the last an empty one. Null if it was not.
static SETTINGS: AtomicPtr<libc::c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Has the settings read from this list, and not from the environment. The list is copied.
///
/// # Safety
/// It is a list of strings that ends in an empty one.
pub(crate) unsafe fn read_settings_from(mut list: *const libc::c_char) {
    let mut copy = Vec::new();
    // SAFETY: the caller's promise.
    while let Some(text) = Some(unsafe { CStr::from_ptr(list) }).filter(|text| !text.is_empty()) {
        copy.extend_from_slice(text.to_bytes_with_nul());
        list = list.wrapping_add(text.count_bytes() + 1);
    }
    copy.push(0);
    SETTINGS.store(copy.leak().as_mut_ptr().cast(), Release);
}

/// Returns the address of the word that [`is_off`] reads. 1 means that the shim is on.
pub(crate) fn switch() -> *const AtomicU32 {
    &raw const OFF
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    let mut settings = SETTINGS.load(Acquire).cast_const();
    if !settings.is_null() {
        // SAFETY: the list lives as long as the process, and ends in an empty string.
        while let Some(text) = Some(unsafe { CStr::from_ptr(settings) }).filter(|text| !text.is_empty()) {
            let value = text.to_bytes().strip_prefix(name.to_bytes());
            if value.is_some_and(|rest| rest.starts_with(b"=")) {
                // SAFETY: the rest of the same string.
                return Some(unsafe { CStr::from_ptr(settings.add(name.count_bytes() + 1)) });
            }
            settings = settings.wrapping_add(text.count_bytes() + 1);
        }
        return None;
    }
    // SAFETY: a look-up in the environment. Callers copy or compare the value before the program
    // could change it.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

/// Returns whether this is the process in which the shim was started, rather than a child (vfork,
/// clone) that shares or copies its memory without the shim's knowledge.
pub(crate) fn is_home() -> bool {
    PID.load(Relaxed) == current_pid()
}

fn current_pid() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

/// Returns the process id, as of the last fork that a hook saw.
pub(crate) fn pid() -> i32 {
    PID.load(Relaxed)
}

/// Updates the process id in a forked child.
pub(crate) fn renew_id() {
    PID.store(current_pid(), Relaxed);
}

/// Detaches a forked child from its parent's page.
pub(crate) fn forget_page() {
    // The parent's page stays mapped: other code may still read endpoints of the parent.
    PAGE.store(std::ptr::null_mut(), Release);
    forget_board();
    *ROWS.lock() = Rows::NONE;
    UNTOLD.iter().for_each(|count| count.store(0, Relaxed));
}

/// Returns the lock of the rows, which no thread changes during a fork.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &ROWS
}

/// Returns the page, once there is one.
#[inline]
pub(crate) fn page() -> Option<&'static Page> {
    let page = PAGE.load(Acquire);
    // SAFETY: set by `make_page` to a mapping that is never unmapped.
    (!page.is_null()).then(|| unsafe { &*page })
}

/// Returns the board, once a broker has accepted this process.
#[inline]
pub(crate) fn board() -> Option<&'static Board> {
    let board = BOARD.load(Acquire);
    // SAFETY: set by `set_board` to a mapping that is never unmapped.
    (!board.is_null()).then(|| unsafe { &*board })
}

/// Maps the board that came with a `Welcome`. Returns `false` if it is not a board or cannot be
/// mapped.
pub(crate) fn set_board(memfd: impl AsFd) -> bool {
    if memfd::verify_sealed(&memfd, BOARD_BYTES).is_err() {
        return false;
    }
    let Ok(fresh) = Shown::map(memfd, BOARD_BYTES) else { return false };
    if fresh.back(BOARD_BYTES).is_err() {
        return false;
    }
    let place = BOARD_PLACE.load(Acquire);
    if place.is_null() {
        BOARD_PLACE.store(fresh.as_ptr().cast_mut().cast(), Release);
        std::mem::forget(fresh);
    } else {
        // SAFETY: the place has a board, which has the same length and is never unmapped.
        if unsafe { fresh.move_over(place.cast_const().cast()) }.is_err() {
            return false;
        }
    }
    let place = BOARD_PLACE.load(Acquire);
    BOARD.store(place, Release);
    // SAFETY: as in `board`.
    set_gate(unsafe { &(*place).inbox });
    true
}

/// Forgets the board until the next `Welcome`. The memory stays mapped, because other threads may
/// be reading it.
fn forget_board() {
    set_gate(&SEEN);
    BOARD.store(std::ptr::null_mut(), Release);
    SEEN.store(0, Release);
}

/// Returns whether a call need check only its own connection: no control message is waiting, and
/// the gate is not shut.
#[inline(always)]
pub(crate) fn is_gate_open() -> bool {
    // SAFETY: the word is in a board, which is never unmapped, or a static.
    let word = unsafe { &*GATE.load(Acquire) };
    word.load(Acquire) == SEEN.load(Relaxed)
}

/// Returns whether someone may ask for latencies. Then the gate is not open, so all calls take the
/// slow path. Returns `true` also if the gate is shut for good.
#[inline(always)]
pub(crate) fn may_latency_be_wanted() -> bool {
    // SAFETY: as in `is_gate_open`.
    let word = unsafe { &*GATE.load(Acquire) };
    word.load(Relaxed) & WANTED != 0
}

/// Returns whether someone asks for latencies.
pub(crate) fn is_latency_wanted() -> bool {
    board().is_some_and(|board| board.inbox.load(Relaxed) & WANTED != 0)
}

/// Returns the time during which latencies are wanted, in nanoseconds.
pub(crate) fn latency_wanted() -> Range<u64> {
    board().map_or(0..0, |board| board.wanted_since.load(Relaxed)..board.wanted_until.load(Relaxed))
}

/// Makes every call check more than its own connection, for good.
pub(crate) fn shut_gate() {
    GATE_IS_SHUT.store(true, SeqCst);
    GATE.store((&raw const NEVER).cast_mut(), SeqCst);
}

fn set_gate(word: &AtomicU64) {
    GATE.store(std::ptr::from_ref(word).cast_mut(), SeqCst);
    // Another thread may have shut the gate meanwhile.
    if GATE_IS_SHUT.load(SeqCst) {
        shut_gate();
    }
}

/// Makes a page for a `Hello`, and returns a descriptor of its memfd, which no other process can
/// map for writing. Each `Hello` needs a new page, because only a new page has a descriptor. The
/// new page replaces the old one and takes over its contents.
pub(crate) fn make_page() -> Option<OwnedFd> {
    let (memfd, fresh): (OwnedFd, Mapping) = memfd::create_sealed("shunt-page", PAGE_BYTES)
        .inspect_err(|error| note_reached(error.raw_os_error()))
        .ok()?;
    // No row may be listed before the replacement, which would have no memory for it.
    let mut rows = ROWS.lock();
    let backed = with_rows(page().map_or(0, |old| old.used().len()));
    mapping::back(fresh.as_ptr(), backed).ok()?;
    match page() {
        Some(old) => {
            copy_report(old, fresh.page()?);
            // SAFETY: a page of the same length, which is never unmapped.
            unsafe { fresh.move_over(std::ptr::from_ref(old).cast_mut().cast()) }.ok()?;
        }
        None => {
            PAGE.store(fresh.as_ptr().cast(), Release);
            std::mem::forget(fresh);
        }
    }
    for (counter, _) in Counter::NAMES {
        count(counter, UNTOLD[counter as usize].swap(0, Relaxed));
    }
    rows.backed = backed;
    drop(rows);
    forget_board();
    Some(memfd)
}

/// Returns the length of a page with so many rows, rounded up to whole pages of memory.
fn with_rows(rows: usize) -> usize {
    (offset_of!(Page, entries) + rows * size_of::<Entry>()).next_multiple_of(4096)
}

/// Copies counters and rows to the page for the next broker.
fn copy_report(old: &Page, fresh: &Page) {
    for (from, to) in old.counters.iter().zip(&fresh.counters) {
        to.store(from.load(Relaxed), Relaxed);
    }
    let sums = old.bypasses.iter().chain(&old.tcp_bytes);
    for (from, to) in sums.zip(fresh.bypasses.iter().chain(&fresh.tcp_bytes)) {
        to.store(from.load(Relaxed), Relaxed);
    }
    fresh.latency.set(&old.latency);
    fresh.rows.store(old.rows.load(Relaxed), Release);
    for (from, to) in old.used().iter().zip(&fresh.entries) {
        if let Some(copy) = from.copy() {
            to.publish(&copy);
            to.latency.set(&from.latency);
        }
    }
}

fn row_of(page: &Page, entry: &Entry) -> Option<usize> {
    let offset = (std::ptr::from_ref(entry) as usize).checked_sub(page.entries.as_ptr() as usize)?;
    let row = offset / size_of::<Entry>();
    (row < ENTRIES).then_some(row)
}

/// Returns a free row of the page.
pub(crate) fn list() -> Option<&'static Entry> {
    let page = page()?;
    let mut rows = ROWS.lock();
    let row = rows.take_old(page).or_else(|| rows.take_new(page)).or_else(|| rows.free.pop_front());
    if row.is_none() {
        count(Counter::Unlisted, 1);
    }
    row.map(|row| &page.entries[usize::from(row)])
}

/// Frees a row, and adds its counts to those of the process.
pub(crate) fn unlist(entry: &Entry) {
    count_tcp(entry, Which::Sent);
    count_tcp(entry, Which::Received);
    count(Counter::LaneBytes, entry.shm_sent.load(Relaxed).wrapping_add(entry.shm_received.load(Relaxed)));
    if let Some(page) = page() {
        page.latency.add_all(&entry.latency);
    }
    entry.end(now());
    if let Some(row) = page().and_then(|page| row_of(page, entry)) {
        ROWS.lock().free.push_back(row as u16);
    }
}

/// Adds what a direction has moved by TCP to the sums by reason. Call it before the row's reason
/// changes or ends.
pub(crate) fn count_tcp(entry: &Entry, which: Which) {
    if let Some(page) = page() {
        page.count_tcp(entry, which);
    }
}

/// Adds to a counter of `shunt status`.
pub(crate) fn count(counter: Counter, amount: u64) {
    let counters = page().map_or(&UNTOLD, |page| &page.counters);
    counters[counter as usize].fetch_add(amount, Relaxed);
}

/// Sets a counter that shows an amount.
pub(crate) fn set_count(counter: Counter, amount: u64) {
    let counters = page().map_or(&UNTOLD, |page| &page.counters);
    counters[counter as usize].store(amount, Relaxed);
}

/// Counts a connection that stays on TCP for `reason`.
pub(crate) fn count_bypass(reason: Reason) {
    if let Some(page) = page() {
        page.bypasses[reason as usize].fetch_add(1, Relaxed);
    }
}
