//! Functions for files and threads that are always one system call, however libc implements them.
//! The functions of [`split`](crate::base::split) bypass libc in a similar way.

use std::ffi::{c_int, c_long};

use crate::base::hidden::hidden;
use crate::base::real;

macro_rules! by_number {
    ($(fn $name:ident($($arg:ident),*) = $number:ident($a:expr, $b:expr, $c:expr, $d:expr);)*) => { $(
        unsafe extern "C" fn $name($($arg: c_long),*) -> c_int {
            // SAFETY: the caller's promise.
            unsafe { real::syscall(libc::$number, $a, $b, $c, $d, 0, 0) as c_int }
        }

        hidden!($name, $name);
    )* };
}

by_number! {
    fn stat64(path, into) = SYS_newfstatat(libc::AT_FDCWD.into(), path, into, 0);
    fn fstat64(fd, into) = SYS_fstat(fd, into, 0, 0);
    fn gettid() = SYS_gettid(0, 0, 0, 0);
}
