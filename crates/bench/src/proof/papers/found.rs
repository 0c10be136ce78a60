//! Compares a claim of a paper with our measurements, line by line.
//!
//! A line is better or worse than a figure only if every round is.

use serde::Serialize;

use super::exhibit::{Claim, Form, Kind, Theirs};
use crate::comparison::{Point, Quantity};
use crate::report::number;
use crate::stats::Spread;

/// The comparison of a claim.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) what: &'static str,
    pub(super) theirs: String,
    pub(super) place: &'static str,
    pub(super) command: String,
    pub(super) ours: String,
    pub(super) verdict: Option<String>,
    /// True if the claim does not hold here.
    pub(super) differs: bool,
    /// The reason why there is no measurement.
    pub(super) missing: Option<String>,
    pub(super) lines: Vec<Line>,
}

/// A line of our measurements.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    label: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    theirs: Option<f64>,
    ours: Spread,
}

/// Figures within this tolerance count as equal to an approximate claim.
const ABOUT: f64 = 0.95;

impl Found {
    /// Compares a claim with the results of its command, or with the reason why there are none.
    pub(super) fn of(claim: &Claim, command: String, measured: &Result<Vec<Point>, String>) -> Found {
        let (lines, missing) = match measured {
            Ok(points) => (claim.lines_of(points), claim.missing(points)),
            Err(missing) => (Vec::new(), Some(missing.clone())),
        };
        let (verdict, differs) = claim.verdict(&lines).unzip();
        Found {
            what: claim.what,
            theirs: claim.theirs.show(claim.form, claim.quantity),
            place: claim.place,
            command,
            ours: claim.show(&lines),
            verdict,
            differs: differs.unwrap_or(false),
            missing: missing.filter(|_| lines.is_empty()),
            lines,
        }
    }

    /// Returns the paper's figure with its place.
    pub(super) fn theirs(&self) -> String {
        if self.place.is_empty() { self.theirs.clone() } else { format!("{} ({})", self.theirs, self.place) }
    }

    /// Returns our figure, or the reason why there is none.
    pub(super) fn ours(&self) -> String {
        self.missing.as_ref().map_or_else(|| self.ours.clone(), |missing| format!("left out: {missing}"))
    }

    /// Returns the cells of a line: the claim, the line, their figure, our figure.
    pub(super) fn row(&self, line: &Line) -> Vec<String> {
        let theirs = line.theirs.map_or_else(String::new, number);
        vec![self.what.to_owned(), line.label.clone(), theirs, line.ours.shown()]
    }
}

impl Claim {
    fn lines_of(&self, points: &[Point]) -> Vec<Line> {
        let (side, other) = self.form.sides();
        let ours = points.iter().filter(|point| self.is_about(point) && point.side == side);
        let of = |point: &Point| {
            let theirs = other.map(|other| {
                let is_other = |at: &&Point| {
                    at.side == other && at.line == point.line && at.table == point.table && self.is_about(at)
                };
                points.iter().find(is_other).map_or(&[][..], |point| &point.rounds)
            });
            // A side alone is paired with itself, and the pair is ignored.
            let theirs = theirs.unwrap_or(&point.rounds);
            let rounds = point.rounds.iter().zip(theirs);
            let ours = Spread::of(rounds.map(|(ours, theirs)| self.form.of(self.quantity, *ours, *theirs)))?;
            let theirs = self.theirs.at(point.at.map(|(_, x)| x));
            Some(Line { label: point.line.clone(), theirs, ours })
        };
        ours.filter_map(of).collect()
    }

    fn missing(&self, points: &[Point]) -> Option<String> {
        let missing =
            points.iter().filter(|point| self.is_about(point)).find_map(|point| point.missing.clone());
        Some(missing.unwrap_or_else(|| "not measured in this run".to_owned()))
    }

    fn show(&self, lines: &[Line]) -> String {
        let show = |figure: &str| self.form.show(self.quantity, figure);
        match lines {
            [] => "-".to_owned(),
            [Line { ours, .. }] if ours.min == ours.max => show(&number(ours.median)),
            [Line { ours, .. }] => {
                let Spread { median, min, max } = *ours;
                format!("{} ({}-{})", show(&number(median)), number(min), number(max))
            }
            _ => {
                let by_median = |one: &&Line, other: &&Line| one.ours.median.total_cmp(&other.ours.median);
                let (least, most) = (lines.iter().min_by(by_median), lines.iter().max_by(by_median));
                let of = |line: Option<&Line>| {
                    line.map_or_else(String::new, |line| {
                        format!("{} ({})", show(&number(line.ours.median)), line.label)
                    })
                };
                format!("{} to {}", of(least), of(most))
            }
        }
    }

    /// Returns the verdict in words, and true if the claim does not hold here.
    fn verdict(&self, lines: &[Line]) -> Option<(String, bool)> {
        if lines.is_empty() {
            return None;
        }
        match self.kind {
            Kind::Gain => self.gain(lines),
            Kind::Cost if matches!(self.theirs, Theirs::Words(_)) => Some((
                at(lines, "costs something", |line| self.loses(line))
                    .unwrap_or_else(|| "costs nothing".to_owned()),
                false,
            )),
            Kind::Cost => Some(match at(lines, "costs more", |line| self.is_less(line)) {
                Some(words) => (words, true),
                None => ("costs no more".to_owned(), false),
            }),
            Kind::Fact => self.fact(lines),
        }
    }

    fn fact(&self, lines: &[Line]) -> Option<(String, bool)> {
        let (neutral, Theirs::About(theirs)) = (self.form.neutral()?, self.theirs) else { return None };
        let beyond = |line: &Line, is_more: bool| {
            if is_more { line.ours.min > neutral } else { line.ours.max < neutral }
        };
        if let Some(words) = at(lines, "not so", |line| beyond(line, theirs < neutral)) {
            return Some((words, true));
        }
        let unclear = at(lines, "no clear difference", |line| !beyond(line, theirs > neutral));
        Some((unclear.unwrap_or_else(|| "so here too".to_owned()), false))
    }

    fn gain(&self, lines: &[Line]) -> Option<(String, bool)> {
        let has_bound = |line: &Line| self.bound(line).is_some();
        let behind = |line: &Line| self.loses(line) && (self.is_less(line) || !has_bound(line));
        let best = |most: f64| lines.iter().any(|line| !self.is_worse(line, most * ABOUT));
        let missed = match self.theirs {
            Theirs::UpTo(most) if !best(most) => Some("less than theirs".to_owned()),
            _ => None,
        };
        let differences: Vec<String> = [
            at(lines, "behind", behind),
            at(lines, "less than theirs", |line| self.is_less(line) && !self.loses(line)),
            missed,
        ]
        .into_iter()
        .flatten()
        .collect();
        if !differences.is_empty() {
            return Some((differences.join("; "), true));
        }
        let words = match self.theirs {
            Theirs::Words(_) => at(lines, "no clear difference", |line| !self.gains(line)),
            _ => Some("as much or more".to_owned()),
        };
        Some((words.unwrap_or_else(|| "gains".to_owned()), false))
    }

    /// Returns true if every round of a line is worse than this figure.
    fn is_worse(&self, line: &Line, than: f64) -> bool {
        let more_is_better = self.form.more_is_better(self.quantity);
        if more_is_better { line.ours.max < than } else { line.ours.min > than }
    }

    fn loses(&self, line: &Line) -> bool {
        self.form.neutral().is_some_and(|neutral| self.is_worse(line, neutral))
    }

    fn gains(&self, line: &Line) -> bool {
        let more_is_better = self.form.more_is_better(self.quantity);
        let Some(neutral) = self.form.neutral() else { return false };
        if more_is_better { line.ours.min > neutral } else { line.ours.max < neutral }
    }

    /// Returns true if it is worse than the paper's figure.
    fn is_less(&self, line: &Line) -> bool {
        self.bound(line).is_some_and(|bound| self.is_worse(line, bound))
    }

    /// Returns the worst figure that would equal the paper's.
    fn bound(&self, line: &Line) -> Option<f64> {
        let more_is_better = self.form.more_is_better(self.quantity);
        let about = |figure: f64| if more_is_better { figure * ABOUT } else { figure / ABOUT };
        match self.theirs {
            Theirs::Between(least, most) => Some(if more_is_better { least } else { most }),
            Theirs::AtLeast(figure) => Some(figure),
            Theirs::About(figure) => Some(about(figure)),
            Theirs::Each(_) => line.theirs.map(about),
            Theirs::UpTo(_) | Theirs::Words(_) => None,
        }
    }
}

/// Returns words about the lines for which `holds` is true.
fn at(lines: &[Line], words: &str, holds: impl Fn(&Line) -> bool) -> Option<String> {
    let labels: Vec<&str> = lines.iter().filter(|line| holds(line)).map(|line| line.label.as_str()).collect();
    match labels.len() {
        0 => None,
        1 if lines.len() == 1 => Some(words.to_owned()),
        count if count == lines.len() => Some(format!("{words} everywhere")),
        _ => Some(format!("{words} at {}", labels.join(", "))),
    }
}

impl Theirs {
    fn at(self, x: Option<f64>) -> Option<f64> {
        let Theirs::Each(figures) = self else { return None };
        figures.iter().find(|(at, _)| Some(*at) == x).map(|(_, figure)| *figure)
    }

    fn show(self, form: Form, quantity: Quantity) -> String {
        let show = |figure: f64| form.show(quantity, &short(figure));
        match self {
            Theirs::Between(least, most) => format!("{} to {}", show(least), show(most)),
            Theirs::About(figure) => format!("about {}", show(figure)),
            Theirs::AtLeast(figure) => format!("{} at least", show(figure)),
            Theirs::UpTo(figure) => format!("up to {}", show(figure)),
            Theirs::Each(figures) => {
                let all = figures.iter().map(|(_, figure)| *figure);
                let (least, most) = (all.clone().fold(f64::INFINITY, f64::min), all.fold(0.0, f64::max));
                format!("{} to {}", show(least), show(most))
            }
            Theirs::Words(words) => words.to_owned(),
        }
    }
}

/// Formats a figure without trailing zeros.
fn short(figure: f64) -> String {
    let text = number(figure);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proof::papers::exhibit::Lines;

    const CLAIM: Claim = Claim {
        what: "operations",
        theirs: Theirs::Between(1.25, 2.0),
        place: "5",
        kind: Kind::Gain,
        command: "local",
        table: "a table",
        lines: Lines::All,
        quantity: Quantity::RATE,
        form: Form::TimesAsFast("shunt", "TCP"),
    };

    fn points(line: &str, shunt: &[f64]) -> [Point; 2] {
        let point = |side, rounds: &[f64]| Point {
            table: "a table of it".to_owned(),
            line: line.to_owned(),
            at: None,
            side,
            quantity: Quantity::RATE,
            rounds: rounds.to_vec(),
            missing: None,
        };
        [point("TCP", &vec![100.0; shunt.len()]), point("shunt", shunt)]
    }

    fn verdict(claim: &Claim, lines: &[(&str, &[f64])]) -> (String, bool) {
        let all = lines.iter().flat_map(|(line, shunt)| points(line, shunt)).collect();
        let found = Found::of(claim, String::new(), &Ok(all));
        (found.verdict.unwrap(), found.differs)
    }

    fn says(claim: &Claim, lines: &[(&str, &[f64])], words: &str, differs: bool) {
        assert_eq!(verdict(claim, lines), (words.to_owned(), differs));
    }

    #[test]
    fn a_line_is_worse_if_every_round_is() {
        says(&CLAIM, &[("one", &[120.0, 130.0]), ("two", &[300.0, 310.0])], "as much or more", false);
        says(&CLAIM, &[("one", &[120.0, 110.0]), ("two", &[300.0, 310.0])], "less than theirs at one", true);
        says(
            &CLAIM,
            &[("one", &[90.0, 95.0]), ("two", &[110.0, 99.0]), ("three", &[200.0, 200.0])],
            "behind at one; less than theirs at two",
            true,
        );
    }

    #[test]
    fn less_is_better_of_times_and_of_costs() {
        let part = Claim { theirs: Theirs::About(0.6), form: Form::PartOf("shunt", "TCP"), ..CLAIM };
        let part = Claim { quantity: Quantity { more_is_better: false, ..Quantity::RATE }, ..part };
        let points =
            |shunt: &[f64]| points("one", shunt).map(|point| Point { quantity: part.quantity, ..point });
        let verdict =
            |shunt: &[f64]| Found::of(&part, String::new(), &Ok(points(shunt).to_vec())).verdict.unwrap();
        assert_eq!(verdict(&[60.0, 62.0]), "as much or more");
        assert_eq!(verdict(&[80.0, 90.0]), "less than theirs");
        assert_eq!(verdict(&[101.0, 120.0]), "behind");
        let cost = Claim { kind: Kind::Cost, theirs: Theirs::About(0.95), ..CLAIM };
        says(&cost, &[("one", &[95.0, 100.0])], "costs no more", false);
        says(&cost, &[("one", &[70.0, 80.0])], "costs more", true);
    }

    #[test]
    fn what_has_no_figure_is_compared_with_no_difference() {
        let words = Claim { theirs: Theirs::Words("faster"), ..CLAIM };
        says(&words, &[("one", &[120.0, 130.0])], "gains", false);
        says(
            &words,
            &[("one", &[90.0, 130.0]), ("two", &[120.0, 121.0])],
            "no clear difference at one",
            false,
        );
        says(&words, &[("one", &[90.0, 80.0]), ("two", &[90.0, 80.0])], "behind everywhere", true);
    }

    #[test]
    fn a_fact_is_so_or_not() {
        let fact = Claim { kind: Kind::Fact, theirs: Theirs::About(0.5), ..CLAIM };
        says(&fact, &[("one", &[90.0, 80.0])], "so here too", false);
        says(&fact, &[("one", &[120.0, 110.0])], "not so", true);
        says(&fact, &[("one", &[120.0, 90.0]), ("two", &[90.0, 90.0])], "no clear difference at one", false);
    }

    #[test]
    fn figures_are_told_in_the_form_of_theirs() {
        let all: Vec<Point> = points("one", &[150.0, 160.0, 170.0]).into();
        let found = Found::of(&CLAIM, String::new(), &Ok(all));
        assert_eq!((found.theirs.as_str(), found.ours.as_str()), ("1.25x to 2x", "1.60x (1.50-1.70)"));
        let both = [points("one", &[150.0]), points("two", &[90.0])].concat();
        assert_eq!(Found::of(&CLAIM, String::new(), &Ok(both)).ours, "0.90x (two) to 1.50x (one)");
        let left_out = Found::of(&CLAIM, String::new(), &Err("root only".to_owned()));
        assert_eq!((left_out.ours().as_str(), left_out.verdict), ("left out: root only", None));
    }
}
