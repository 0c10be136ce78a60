//! The lowest layer of the shim: memory, locks, threads, signals, system calls, and the table of
//! descriptors. It knows nothing of connections.

pub(crate) mod alloc;
pub(crate) mod arch;
pub(crate) mod attempts;
pub(crate) mod budget;
pub(crate) mod by_number;
pub(crate) mod children;
pub(crate) mod clib;
pub(crate) mod code;
pub(crate) mod errno;
pub(crate) mod hidden;
pub(crate) mod kernel;
pub(crate) mod library;
pub(crate) mod lock;
pub(crate) mod names;
pub(crate) mod order;
pub(crate) mod own_table;
pub(crate) mod pace;
pub(crate) mod panic;
pub(crate) mod plan;
pub(crate) mod private;
pub(crate) mod process;
pub(crate) mod rank;
pub(crate) mod real;
pub(crate) mod signal;
pub(crate) mod spin;
pub(crate) mod split;
pub(crate) mod table;
pub(crate) mod thread;
pub(crate) mod thread_cache;
pub(crate) mod thread_end;
pub(crate) mod undo_log;
pub(crate) mod unwind;
pub(crate) mod upcall;
pub(crate) mod waiter;
