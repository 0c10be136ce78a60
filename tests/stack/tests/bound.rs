//! Checks the bound on the shim's stack usage: for all paths from hooks, from the signal
//! trampoline, around a fork, and at a thread's end.
//!
//! Calls that the shim makes in libc for the program are not counted, because the program needs the
//! same stack without shunt. Panics, which end the program, are not counted either, nor a thread's
//! cancellation, which unwinds on the same stack in any case.
#![cfg(target_arch = "x86_64")]

use std::collections::BTreeSet;
use std::path::PathBuf;

use shunt_stack::graph::{Graph, Reviewed};
use shunt_stack::library::Library;
use shunt_stack::sources::Sources;

/// The bound that SPECIFICATION.md promises.
const BOUND: i64 = 8 * 1024;

/// Facts that the code does not show, with their reasons.
const REVIEWED: Reviewed = Reviewed {
    // A panic aborts the program. Unwinding belongs to a cancelled thread, and libgcc has frames
    // below it in any case.
    endings: &[
        "_Unwind_Resume",
        "alloc::alloc::handle_alloc_error",
        "alloc::raw_vec::handle_error",
        "core::cell::panic_",
        "core::option::",
        "core::panicking::",
        "core::result::unwrap_failed",
        "core::slice::index::slice_",
        "core::str::slice_error_fail",
        "shunt::base::panic::",
        "shunt::base::unwind::_Unwind_Resume",
        "std::panicking::",
    ],
    lookups: &[
        "dlsym",
        "hooks::loading::behind",
        "hooks::raw::route",
        "hooks::ring::find",
        "library::iterate",
        "real::found",
        "real::resolve",
        "split::find",
        "unwind::find",
    ],
    // These call the program's own signal handlers, or end in the program's own call, like the last
    // call of a hook or of its closure. The shim's replacements for functions of the dynamic linker
    // and of threads continue in libc's.
    programs: &[
        "base::by_number::",
        "base::split::",
        "signal::deliver::run",
        "hooks::readiness::select_among",
        "call_once{{vtable.shim}}",
    ],
    // The checks of the program's memory, through a `Reach` of shunt_ring. The same pattern matches
    // the kernel's clock, through a pointer that rustix keeps, and the destructor of an error's
    // content, which none of shunt's errors has.
    first: &["shunt_sys::memory::is_writable", "ops::send::is_source_readable"],
    pointers: &[
        // Formatted text goes into an array or a string: names of files in /proc, of numbers and
        // text.
        (
            "core::fmt::write",
            &[WRITES, "core::fmt::num::", "<str as core::fmt::Display>", "<&T as core::fmt::Display>"],
        ),
        ("core::fmt::Formatter", &[WRITES]),
        ("hooks::raw::intercept::answer", &["hooks::raw::hook::hook"]),
        ("intercept::alone::answer", &["hooks::raw::hook::hook"]),
        ("intercept::linked::answer", &["hooks::raw::hook::hook"]),
        // The slow paths of a hook's call.
        ("ops::begin_slowly", &SLOWLY),
        ("ops::send_fast::send_many", &SLOWLY),
        ("ops::receive_fast::receive_many", &SLOWLY),
        // The hash function of a map with integer keys.
        ("RawTableInner>::rehash_in_place", &["reserve_rehash::{{closure}}"]),
        // Callbacks for state that is announced during a sleep.
        ("announced::count_own_calls", &["ops::undo::"]),
        ("fork::begin_child", &["ops::undo::"]),
        ("announced::calls_on", &["ops::undo::"]),
        ("undo::own_calls", &["undo::counted_once", "undo::calls_of_poll"]),
        // The compiler has put that function into this one.
        ("ops::descriptors::forget", &["undo::counted_once", "undo::calls_of_poll"]),
        ("std::sys::sync::once::futex::Once", &["Once::call_once_force"]),
    ],
    never: &[
        // This has run when the process started.
        ("", "rustix::backend::vdso_wrappers::init"),
        // Only for kernels without getrandom, which are older than any that the shim supports.
        ("", "std::sys::random::linux::getrandom"),
        // Only the first look-up of a hook finds the table wiped. It is counted separately below.
        ("", "table::missing"),
        // Descriptors that the shim itself drops are in no table, so close only looks them up.
        ("shunt", "close"),
        ("rustix", "close"),
        ("drop_in_place", "close"),
        ("shunt_sys::", "ops::descriptors::close"),
        ("RecvAncillaryBuffer", "ops::descriptors::close"),
        ("epoll::listing::of", "ops::descriptors::close"),
        ("take_slot", "ops::descriptors::close"),
        ("waiter::Slot::take", "ops::descriptors::close"),
        ("waiter::Slot::make_listener", "ops::descriptors::close"),
        ("socket::sharing::sharing", "ops::descriptors::close"),
        // A deferred signal is delivered with all others blocked, so no further one is delivered
        // after it.
        ("signal::deliver::run", "drop_in_place<shunt::base::signal::shield::Shield>"),
        ("signal::deliver::run", "shunt::base::signal::shield::"),
        ("signal::deliver::run", "signal::deliver::release"),
        ("signal::action::begin", "signal::deliver::release"),
        ("signal::action::begin", "drop_in_place<shunt::base::signal::shield::Shield>"),
    ],
    circles: &[
        // The reason for closing a lane is checked, and closing it checks the lane once more.
        ("tx::Tx::judge", "tx::Tx::judge"),
        // One closure calls the other, which only counts.
        ("selecting_with_timeval::{{closure}}", "selecting_with_timeval::{{closure}}"),
    ],
};

const SLOWLY: [&str; 4] =
    ["hooks::io::read_slowly", "hooks::io::recv_slowly", "hooks::io::write_slowly", "hooks::io::send_slowly"];

const WRITES: &str = "Adapter<T> as core::fmt::Write>::write_";

fn library() -> PathBuf {
    match std::env::var_os("SHUNT_BIN") {
        Some(shunt) => PathBuf::from(shunt).with_file_name("libshunt.so"),
        None => shunt_built::release_dir().join("libshunt.so"),
    }
}

/// The most stack that a call uses before its first look-up.
const BEFORE_LOOK_UP: i64 = 1024;

/// All entry points of the library that are not hooks.
const OTHER_ENTRIES: [&str; 9] = [
    "shunt::intercept::alone::answer",
    "shunt::intercept::linked::answer",
    "shunt::intercept::block::adopt_here",
    "shunt::base::signal::deliver::trampoline",
    "shunt::fork::before",
    "shunt::fork::after_in_parent",
    "shunt::fork::after_in_child",
    "shunt::base::thread_end::ends",
    "shunt::start",
];

/// Checks that every reviewed fact is about code that exists. A change of a private name would
/// otherwise leave an entry without effect. The source has the functions that the compiler has
/// inlined into all their callers.
#[test]
fn every_reviewed_entry_matches_a_function() {
    let file = library();
    let bytes =
        std::fs::read(&file).unwrap_or_else(|_| panic!("{} is missing: run `make build`", file.display()));
    let library = Library::read(&bytes);
    let sources = Sources::read();
    let unmatched = REVIEWED.unmatched(|pattern| {
        library.names.iter().any(|name| pattern.matches(name)) || sources.define(pattern.text())
    });
    assert!(unmatched.is_empty(), "these match nothing:\n{}", unmatched.join("\n"));
    assert!(!sources.define("ops::undo::no_such_function") && !sources.define("no_module::own_calls"));
}

#[test]
fn no_path_takes_more_stack_than_is_promised() {
    let file = library();
    let bytes =
        std::fs::read(&file).unwrap_or_else(|_| panic!("{} is missing: run `make build`", file.display()));
    let library = Library::read(&bytes);
    let named = |name: &str| {
        let found = library.functions.iter().find(|(_, one)| one.name == name);
        *found.unwrap_or_else(|| panic!("there is no {name}")).0
    };
    let mut graph = Graph::new(&library, &REVIEWED);
    let entries: BTreeSet<_> = library.exports.values().copied().chain(OTHER_ENTRIES.map(named)).collect();
    let mut needs: Vec<_> = entries.into_iter().map(|entry| (graph.needs(entry), entry)).collect();
    let missing = named("shunt::base::table::missing");
    needs.push((BEFORE_LOOK_UP + graph.needs(missing), missing));
    needs.sort_unstable();
    needs.iter().for_each(|(need, entry)| println!("{need:6} {}", library.name(*entry)));
    let (most, entry) = *needs.last().expect("it exports something");
    let path = graph.path(entry).join("\n");
    println!("the deepest:\n{path}");
    let puzzles: Vec<_> = graph.puzzles.iter().map(String::as_str).collect();
    assert!(puzzles.is_empty(), "what the code does not show must be reviewed:\n{}", puzzles.join("\n"));
    assert!(most <= BOUND, "{} takes {most} bytes:\n{path}", library.name(entry));
}
