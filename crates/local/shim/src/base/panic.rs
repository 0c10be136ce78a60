//! Handling of a panic, which is always a bug of the shim: reports once what happened and what to
//! do about it, and ends the program. A panic never crosses a C boundary, because unwinding through
//! a program's frames would be a second bug.
//!
//! A panic can happen anywhere, so the report allocates nothing, takes no lock and calls no
//! function of libc.

use std::any::Any;
use std::fmt::{self, Write};
use std::os::fd::RawFd;
use std::panic::{Location, PanicHookInfo};
use std::sync::atomic::{AtomicBool, Ordering::*};

use crate::base::private::borrow;

const STANDARD_ERROR: RawFd = 2;

/// Installs the panic hook.
pub(crate) fn install() {
    std::panic::set_hook(Box::new(tell));
}

fn tell(info: &PanicHookInfo<'_>) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    // If several threads panic together, only the first reports.
    if !TOLD.swap(true, Relaxed) {
        let mut report = Report { text: [0; MOST], len: 0 };
        // Text beyond the buffer is dropped.
        let _ = describe(&mut report, said(info.payload()), info.location());
        let _ = rustix::io::write(borrow(STANDARD_ERROR), report.text());
    }
    std::process::abort();
}

fn said(payload: &dyn Any) -> &str {
    let literal = payload.downcast_ref::<&str>().copied();
    literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason given")
}

fn describe(report: &mut Report, what: &str, place: Option<&Location<'_>>) -> fmt::Result {
    let (file, line) = place.map_or(("nowhere", 0), |place| (place.file(), place.line()));
    // Leaves room for the advice.
    let what = &what[..what.floor_char_boundary(MOST / 2)];
    writeln!(report, "shunt: a bug in libshunt.so {VERSION} ends this program: {what} ({file}:{line})")?;
    writeln!(report, "shunt: please report this line and what the program was doing")?;
    writeln!(report, "shunt: until it is mended, run the program without shunt, or with SHUNT_TRANSPORT=tcp")
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
const MOST: usize = 1024;

/// A text buffer of fixed size.
struct Report {
    text: [u8; MOST],
    len: usize,
}

impl Report {
    fn text(&self) -> &[u8] {
        &self.text[..self.len]
    }
}

impl Write for Report {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = &mut self.text[self.len..];
        let len = part.len().min(room.len());
        room[..len].copy_from_slice(&part.as_bytes()[..len]);
        self.len += len;
        if len == part.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(what: &str) -> String {
        let mut report = Report { text: [0; MOST], len: 0 };
        let _ = describe(&mut report, what, Some(Location::caller()));
        String::from_utf8(report.text().to_vec()).expect("text")
    }

    #[test]
    fn a_report_says_what_and_where_and_what_to_do() {
        let told = text("fd != -1");
        for part in ["fd != -1", "panic.rs:", VERSION, "please report", "without shunt"] {
            assert!(told.contains(part), "{part:?} is missing: {told}");
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let report = text(&format!("a{}", "é".repeat(MOST)));
        assert!(report.contains("please report") && report.contains("without shunt"), "{report}");
    }

    /// Runs in a separate process, which it ends.
    #[test]
    #[ignore = "ends the process: a_panic_speaks_once_and_ends_the_process runs it"]
    fn panics() {
        install();
        let index = std::hint::black_box(7);
        let _ = [0; 3][index];
    }

    #[test]
    fn a_panic_speaks_once_and_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        let itself = std::env::current_exe().expect("a test has a file");
        let (_, here) = module_path!().split_once("::").expect("the crate's name comes first");
        let panics = format!("{here}::panics");
        let ended = std::process::Command::new(itself)
            .args(["--exact", &panics, "--ignored", "--nocapture"])
            .output()
            .expect("it can be started");
        let told = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{told}");
        assert_eq!(told.matches("index out of bounds").count(), 1, "{told}");
        assert_eq!(told.matches("please report").count(), 1, "{told}");
    }

    #[test]
    fn a_long_reason_leaves_room_for_what_to_do() {
        let told = text(&"x".repeat(10 * MOST));
        assert!(told.contains("without shunt") && told.len() <= MOST, "{told}");
    }
}
