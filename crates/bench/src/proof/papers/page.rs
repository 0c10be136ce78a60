//! Formats the comparison with the papers as a page.

use super::{Answered, Papers};
use crate::report::{Column, Page};

impl Papers {
    pub(in super::super) fn page(&self) -> String {
        let mut page = Page::new("shunt report --papers");
        page.paragraph(
            "lead",
            "What the papers found that shunt comes from, and what this machine shows, measured in this run.",
        );
        page.paragraph(
            "faint",
            &format!(
                "Ours are medians of {} rounds, sides in turn within each, in brackets the least and the most; of several lines, the \
                 least and the greatest median. It is otherwise here only where every round says so. Measured on {}.",
                self.rounds,
                self.surroundings.line()
            ),
        );
        for (command, why) in &self.failed {
            page.alarm(&format!("{command} failed: {why}"));
        }
        for (command, why) in &self.left_out {
            page.paragraph("bad", &format!("left out: {command}: {why}"));
        }
        self.differences(&mut page);
        page.heading("All of it");
        self.table(&mut page);
        for answered in self.exhibits.iter().filter(|answered| answered.is_measured()) {
            lines(&mut page, answered);
        }
        page.heading("The papers");
        let mut titles: Vec<Vec<String>> =
            self.exhibits.iter().map(|of| vec![of.paper.to_owned(), of.title.to_owned()]).collect();
        titles.dedup();
        page.table(&[("", Column::Words), ("", Column::Words)], &titles);
        page.heading("The machine");
        page.table(&[("", Column::Words), ("", Column::Words)], &self.surroundings.rows());
        page.heading("Repeat it");
        page.preformatted(&self.command);
        page.finish()
    }

    fn differences(&self, page: &mut Page) {
        let differences: Vec<String> = self.differing().collect();
        if !differences.is_empty() {
            page.heading("What does not hold here");
        }
        differences.iter().for_each(|difference| page.paragraph("bad", difference));
    }

    fn table(&self, page: &mut Page) {
        let head = ["paper", "figure", "what it shows", "command", "theirs", "ours", "so", "plot"]
            .map(|title| (title, Column::Words));
        let mut rows = Vec::new();
        for answered in &self.exhibits {
            let named =
                |what: &str| vec![answered.paper.to_owned(), answered.figure.to_owned(), what.to_owned()];
            if let Some(why) = answered.not_measured {
                let mut row = named(answered.shows);
                row.extend([
                    String::new(),
                    String::new(),
                    format!("not measured: {why}"),
                    String::new(),
                    String::new(),
                ]);
                rows.push(row);
            }
            for found in &answered.claims {
                let mut row = named(&format!("{}: {}", answered.shows, found.what));
                let verdict = found.verdict.clone().unwrap_or_default();
                let plot = if answered.plots.is_empty() { String::new() } else { heading(answered) };
                row.extend([found.command.clone(), found.theirs(), found.ours(), verdict, plot]);
                rows.push(row);
            }
        }
        page.table(&head, &rows);
    }
}

/// Returns the heading of an exhibit.
fn heading(answered: &Answered) -> String {
    format!("{}, {}", answered.paper, answered.figure)
}

/// Appends the plots and all measured lines.
fn lines(page: &mut Page, answered: &Answered) {
    page.heading(&heading(answered));
    page.paragraph("faint", answered.shows);
    page.figures(&answered.plots);
    let head = [
        ("", Column::Words),
        ("line", Column::Words),
        ("theirs", Column::Numbers),
        ("ours", Column::Numbers),
    ];
    let rows: Vec<Vec<String>> =
        answered.claims.iter().flat_map(|found| found.lines.iter().map(|line| found.row(line))).collect();
    page.table(&head, &rows);
}
