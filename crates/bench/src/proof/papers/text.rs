//! Formats the comparison with the papers for a terminal.

use std::fmt::Write;

use super::Papers;

impl Papers {
    pub(in super::super) fn text(&self) -> String {
        let mut out = format!(
            "{}\nMedians of {} rounds, sides in turn within each; {:.0} s in all.\n",
            self.surroundings.line(),
            self.rounds,
            self.seconds_in_all
        );
        for answered in &self.exhibits {
            let _ = writeln!(out, "\n{}, {}: {}", answered.paper, answered.figure, answered.shows);
            if let Some(why) = answered.not_measured {
                let _ = writeln!(out, "  not measured: {why}");
            }
            for found in &answered.claims {
                let verdict =
                    found.verdict.as_ref().map_or_else(String::new, |verdict| format!("  {verdict}"));
                let _ = writeln!(
                    out,
                    "  {}\n    theirs {}; ours {}{verdict}\n    {}",
                    found.what,
                    found.theirs(),
                    found.ours(),
                    found.command
                );
            }
        }
        for (command, why) in &self.left_out {
            let _ = writeln!(out, "\nleft out: {command}: {why}");
        }
        for difference in self.differing() {
            let _ = writeln!(out, "\n!! {difference}");
        }
        out
    }

    /// Returns the claims that do not hold here, each in a sentence.
    pub(super) fn differing(&self) -> impl Iterator<Item = String> {
        self.exhibits.iter().flat_map(|answered| {
            answered.claims.iter().filter(|found| found.differs).map(|found| {
                let verdict = found.verdict.as_deref().unwrap_or_default();
                let (paper, figure, what) = (answered.paper, answered.figure, found.what);
                format!(
                    "{paper}, {figure}: {what}: {verdict} (theirs {}, ours {})",
                    found.theirs,
                    found.ours()
                )
            })
        })
    }
}
