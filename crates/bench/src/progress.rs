//! Reports a comparison's progress on standard error: an estimate of its length, and then a bar on
//! a terminal, or else a line periodically.

use std::cell::{Cell, RefCell};
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The interval between two lines without a terminal.
const PAUSE: Duration = Duration::from_secs(10);

/// The progress of a comparison.
pub(crate) struct Progress {
    /// Drawn only on a terminal, but always counts.
    bar: ProgressBar,
    lines: Option<Lines>,
}

struct Lines {
    said_at: Cell<Instant>,
    message: RefCell<String>,
}

impl Progress {
    /// Starts with this number of turns and their approximate length.
    pub(crate) fn begin(turns: u64, turn: Duration) -> Progress {
        eprintln!("{}", estimate(turns, turn));
        let bar = ProgressBar::with_draw_target(Some(turns), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len}, {eta} to go  {msg}");
        let bar = bar.with_style(style.expect("a template that is right"));
        let lines = (!stderr().is_terminal())
            .then(|| Lines { said_at: Cell::new(Instant::now()), message: RefCell::default() });
        Progress { bar, lines }
    }

    /// Sets the description of the current work.
    pub(crate) fn set_message(&self, message: String) {
        if let Some(lines) = &self.lines {
            lines.message.replace(message.clone());
        }
        self.bar.set_message(message);
    }

    /// Counts finished turns.
    pub(crate) fn inc(&self, turns: u64) {
        self.bar.inc(turns);
        let Some(lines) = self.lines.as_ref().filter(|lines| lines.said_at.get().elapsed() >= PAUSE) else {
            return;
        };
        lines.said_at.set(Instant::now());
        eprintln!("{}: {}", self.done(), lines.message.borrow());
    }

    fn done(&self) -> String {
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        format!("{done} of {all} turns, {} to go", time(self.bar.eta()))
    }

    /// Prints a line that remains visible.
    pub(crate) fn say(&self, line: &str) {
        self.bar.suspend(|| eprintln!("{line}"));
    }

    pub(crate) fn end(self) {
        self.bar.finish_and_clear();
    }
}

fn estimate(turns: u64, turn: Duration) -> String {
    format!("{turns} turns, about {} in all", time(turn * turns.try_into().unwrap_or(u32::MAX)))
}

/// Formats a duration for people.
pub(crate) fn time(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..100 => format!("{} s", seconds.max(1)),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_it_is() {
        let progress = Progress::begin(3, Duration::from_secs(1));
        progress.inc(1);
        let line = progress.done();
        assert!(line.starts_with("1 of 3 turns, ") && line.ends_with(" to go"), "{line}");
    }

    #[test]
    fn the_estimate_is_in_seconds_or_minutes() {
        assert_eq!(estimate(5, Duration::from_millis(100)), "5 turns, about 1 s in all");
        assert_eq!(estimate(90, Duration::from_secs(1)), "90 turns, about 90 s in all");
        assert_eq!(estimate(360, Duration::from_millis(400)), "360 turns, about 3 min in all");
    }
}
