//! What the shim knows of its process: its settings, its page, its counters, and what the broker shows it on its board.

use std::ffi::{CStr, CString};
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

use shunt_abi::page::{BOARD_BYTES, Board, Counter, ENTRIES, Entry, PAGE_BYTES, Page, Which};
use shunt_abi::reason::Reason;
use shunt_abi::rules;
pub(crate) use shunt_sys::clock::now;
use shunt_sys::mapping::{self, Mapping, Shown};
use shunt_sys::memfd;

use crate::base::lock::Lock;

static PAGE: AtomicPtr<Page> = AtomicPtr::new(std::ptr::null_mut());
/// The board of the broker that has taken this process in last.
static BOARD: AtomicPtr<Board> = AtomicPtr::new(std::ptr::null_mut());
/// Where boards are mapped, one over the other, once there has been one.
static BOARD_PLACE: AtomicPtr<Board> = AtomicPtr::new(std::ptr::null_mut());
static ROWS: Lock<Rows> = Lock::new(Rows::NONE);
static PID: AtomicI32 = AtomicI32::new(0);
static BROKER_PATHS: OnceLock<Vec<CString>> = OnceLock::new();
static DOOR_PATH: OnceLock<CString> = OnceLock::new();
/// 1: on, 2: off, 0: not asked yet.
static OFF: AtomicU32 = AtomicU32::new(0);
static SPIN: AtomicU32 = AtomicU32::new(SPIN_AUTO);
/// See [`is_in_use`].
static IN_USE: AtomicBool = AtomicBool::new(false);
/// What has been counted while there was no page.
static UNTOLD: [AtomicU64; Counter::COUNT] = [const { AtomicU64::new(0) }; Counter::COUNT];
static OFFERS_AT_ONCE: AtomicBool = AtomicBool::new(false);
static TRUSTS_OWN_CALLS: AtomicBool = AtomicBool::new(false);
/// How many control messages have been taken from the socket.
pub(crate) static SEEN: AtomicU64 = AtomicU64::new(0);
/// What is as [`SEEN`] if a call need look at nothing but its own connection: the board's count of the messages that the broker has
/// sent, or where there is no board, that number itself.
static GATE: AtomicPtr<AtomicU64> = AtomicPtr::new((&raw const SEEN).cast_mut());
/// See [`shut_gate`].
static GATE_IS_SHUT: AtomicBool = AtomicBool::new(false);
static NEVER: AtomicU64 = AtomicU64::new(u64::MAX);

const SPIN_AUTO: u32 = u32::MAX;

struct Rows {
    free: Vec<u16>,
    next: u16,
    /// Bytes of the page, from its first, with memory behind them.
    backed: usize,
}

impl Rows {
    const NONE: Rows = Rows { free: Vec::new(), next: 0, backed: 0 };

    /// Whether there is memory behind the next row.
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
    /// For a bounded time, while it pays.
    Auto,
    /// So many nanoseconds each time; 0 is off.
    Nanos(u64),
}

/// Reads the settings, before main: some programs clear their environment later.
pub(crate) fn start() {
    PID.store(current_pid(), Relaxed);
    // What finds the clock reads files where the kernel is old, and takes more stack than any thread may have later.
    now();
    let _ = BROKER_PATHS.set(broker_paths_now());
    if let Some(path) = variable(c"SHUNT_DOOR") {
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

/// Whether it is to be on TCP (`--transport tcp`), or the program is in a sandbox (`crate::program::sandbox`): then nothing is tracked at all,
/// and no hook makes a system call that the program has not asked for.
#[inline]
pub(crate) fn is_off() -> bool {
    match OFF.load(Acquire) {
        0 => {
            let off = setting(c"SHUNT_TRANSPORT", "transport") == Some(b"tcp");
            let _ = OFF.compare_exchange(0, 1 + u32::from(off), AcqRel, Relaxed);
            off
        }
        word => word == 2,
    }
}

/// Before anything is tracked, and before a lock that belongs to it is taken.
#[inline]
pub(crate) fn note_use() {
    if !IN_USE.load(Relaxed) {
        IN_USE.store(true, SeqCst);
    }
}

/// Whether this process, or one that it was forked from, has ever tracked a descriptor. Until then there is nothing to do
/// around a fork, and nothing is written: the kernel would have to copy every page of memory that is.
pub(crate) fn is_in_use() -> bool {
    IN_USE.load(SeqCst)
}

/// Nothing is tracked from now on.
pub(crate) fn turn_off() {
    OFF.store(2, Release);
}

pub(crate) fn spin() -> Spin {
    match SPIN.load(Relaxed) {
        SPIN_AUTO => Spin::Auto,
        micros => Spin::Nanos(u64::from(micros) * 1000),
    }
}

/// Whether connections are offered at their first use: `shunt run --offer at-once`.
pub(crate) fn offers_at_once() -> bool {
    OFFERS_AT_ONCE.load(Relaxed)
}

/// Returns whether the operator vouches for the system calls that the program makes past libc: `shunt run --own-calls trust`.
pub(crate) fn trusts_own_calls() -> bool {
    TRUSTS_OWN_CALLS.load(Relaxed)
}

/// The command that enters programs without a dynamic linker, if whoever started this one has said where it is.
pub(crate) fn door_path() -> Option<&'static CStr> {
    DOOR_PATH.get().map(CString::as_c_str)
}

/// Where the broker may be, best first. Nowhere before the settings have been read.
pub(crate) fn broker_paths() -> &'static [CString] {
    BROKER_PATHS.get().map_or(&[], Vec::as_slice)
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

/// The path that the process was started by, as execve was given it.
pub(crate) fn started_from() -> &'static CStr {
    // SAFETY: the kernel's own string, or null.
    unsafe {
        let path = libc::getauxval(libc::AT_EXECFN) as *const libc::c_char;
        if path.is_null() { c"" } else { CStr::from_ptr(path) }
    }
}

/// What the environment says of `key`: in a variable of its own, else in the rules of the configuration.
fn setting(name: &CStr, key: &str) -> Option<&'static [u8]> {
    let own = variable(name).map(CStr::to_bytes);
    own.or_else(|| {
        let program = rules::name_of(started_from().to_bytes());
        rules::value(variable(c"SHUNT_RULES")?.to_bytes(), |name| name == program, key)
    })
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: a look-up in the environment; values are copied or compared at once, before the program could
    // change them.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

/// Whether this is the process the shim was started in, and not a child of vfork or clone that shares or copied
/// its memory without our knowledge.
pub(crate) fn is_home() -> bool {
    PID.load(Relaxed) == current_pid()
}

fn current_pid() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

/// Process id as of the last fork that was seen.
pub(crate) fn pid() -> i32 {
    PID.load(Relaxed)
}

/// A forked child has an id of its own.
pub(crate) fn renew_id() {
    PID.store(current_pid(), Relaxed);
}

/// A forked child starts without page.
pub(crate) fn forget_page() {
    // The parent's page stays mapped: endpoints of the parent's may be read while this is done.
    PAGE.store(std::ptr::null_mut(), Release);
    forget_board();
    *ROWS.lock() = Rows::NONE;
    UNTOLD.iter().for_each(|count| count.store(0, Relaxed));
}

/// Nobody changes a row while the process is copied.
pub(crate) fn hold_lock() {
    ROWS.hold();
}

/// In both processes.
///
/// # Safety
/// After [`hold_lock`], on the same thread.
pub(crate) unsafe fn release_lock() {
    // SAFETY: the caller's promise.
    unsafe { ROWS.release() };
}

/// In a child that nobody announced.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn reset_lock() {
    // SAFETY: the caller's promise.
    unsafe { ROWS.reset() };
}

/// The page, once there is one.
#[inline]
pub(crate) fn page() -> Option<&'static Page> {
    let page = PAGE.load(Acquire);
    // SAFETY: set by `make_page` to a mapping that is never unmapped.
    (!page.is_null()).then(|| unsafe { &*page })
}

/// The board, once a broker has taken this process in.
#[inline]
pub(crate) fn board() -> Option<&'static Board> {
    let board = BOARD.load(Acquire);
    // SAFETY: set by `set_board` to a mapping that is never unmapped.
    (!board.is_null()).then(|| unsafe { &*board })
}

/// Keeps the board that came with a welcome. `false` if it is none, or cannot be mapped.
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
        // SAFETY: a board, so of the same length, which is never unmapped.
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

/// There is no board before the next welcome. The memory stays mapped: other threads may look at it.
fn forget_board() {
    set_gate(&SEEN);
    BOARD.store(std::ptr::null_mut(), Release);
    SEEN.store(0, Release);
}

/// Whether a call need look at nothing but its own connection.
#[inline(always)]
pub(crate) fn is_gate_open() -> bool {
    // SAFETY: of a board that is never unmapped, or of our own.
    let word = unsafe { &*GATE.load(Acquire) };
    word.load(Acquire) == SEEN.load(Relaxed)
}

/// There is something else for every call to look at, for good.
pub(crate) fn shut_gate() {
    GATE_IS_SHUT.store(true, SeqCst);
    GATE.store((&raw const NEVER).cast_mut(), SeqCst);
}

fn set_gate(word: &AtomicU64) {
    GATE.store(std::ptr::from_ref(word).cast_mut(), SeqCst);
    // Also if another thread does so at this moment.
    if GATE_IS_SHUT.load(SeqCst) {
        shut_gate();
    }
}

/// Makes a page for a hello, and returns a descriptor of its memfd, which nobody else can map for writing. A page is made anew for
/// each hello, because only then is there a descriptor; it takes the place of the one before, with what that one reported.
pub(crate) fn make_page() -> Option<OwnedFd> {
    let (memfd, fresh): (OwnedFd, Mapping) = memfd::create_sealed("shunt-page", PAGE_BYTES).ok()?;
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
    ROWS.lock().backed = backed;
    forget_board();
    Some(memfd)
}

/// Bytes of a page up to the end of so many rows, in whole pages of memory.
fn with_rows(rows: usize) -> usize {
    (offset_of!(Page, entries) + rows * size_of::<Entry>()).next_multiple_of(4096)
}

/// What a process has counted goes with it to its next broker.
fn copy_report(old: &Page, fresh: &Page) {
    for (from, to) in old.counters.iter().zip(&fresh.counters) {
        to.store(from.load(Relaxed), Relaxed);
    }
    let sums = old.bypasses.iter().chain(&old.tcp_bytes);
    for (from, to) in sums.zip(fresh.bypasses.iter().chain(&fresh.tcp_bytes)) {
        to.store(from.load(Relaxed), Relaxed);
    }
    fresh.rows.store(old.rows.load(Relaxed), Release);
    for (from, to) in old.used().iter().zip(&fresh.entries) {
        if let Some(copy) = from.copy() {
            to.publish(&copy);
        }
    }
}

fn row_of(page: &Page, entry: &Entry) -> Option<usize> {
    let offset = (std::ptr::from_ref(entry) as usize).checked_sub(page.entries.as_ptr() as usize)?;
    let row = offset / size_of::<Entry>();
    (row < ENTRIES).then_some(row)
}

/// A free row of the page.
pub(crate) fn list() -> Option<&'static Entry> {
    let page = page()?;
    let mut rows = ROWS.lock();
    let row = match rows.free.pop() {
        Some(row) => row,
        None if (rows.next as usize) < ENTRIES && rows.back_next(page) => {
            rows.next += 1;
            page.rows.store(rows.next.into(), Release);
            rows.next - 1
        }
        None => {
            count(Counter::Unlisted, 1);
            return None;
        }
    };
    Some(&page.entries[row as usize])
}

/// Gives a row back. What it has counted is kept.
pub(crate) fn unlist(entry: &Entry) {
    count_tcp(entry, Which::Sent);
    count_tcp(entry, Which::Received);
    count(Counter::LaneBytes, entry.shm_sent.load(Relaxed).wrapping_add(entry.shm_received.load(Relaxed)));
    entry.clear();
    if let Some(row) = page().and_then(|page| row_of(page, entry)) {
        ROWS.lock().free.push(row as u16);
    }
}

/// Keeps what a direction has moved by TCP, before its row shows another reason or none.
pub(crate) fn count_tcp(entry: &Entry, which: Which) {
    if let Some(page) = page() {
        page.count_tcp(entry, which);
    }
}

/// Counts something for `shunt status`.
pub(crate) fn count(counter: Counter, amount: u64) {
    let counters = page().map_or(&UNTOLD, |page| &page.counters);
    counters[counter as usize].fetch_add(amount, Relaxed);
}

/// Sets a counter that stands for an amount.
pub(crate) fn set_count(counter: Counter, amount: u64) {
    let counters = page().map_or(&UNTOLD, |page| &page.counters);
    counters[counter as usize].store(amount, Relaxed);
}

/// Counts a bypass.
pub(crate) fn count_bypass(reason: Reason) {
    if let Some(page) = page() {
        page.bypasses[reason as usize].fetch_add(1, Relaxed);
    }
}
