//! The description of a paper's exhibits: a figure, a table or a passage with its claims, and the
//! measurements that correspond to them.

use crate::comparison::{Point, Quantity};

/// A paper.
#[derive(Debug)]
pub(super) struct Paper {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) exhibits: &'static [Exhibit],
}

/// An exhibit of a paper.
#[derive(Debug)]
pub(super) struct Exhibit {
    /// The name in the paper.
    pub(super) name: &'static str,
    pub(super) shows: &'static str,
    pub(super) answer: Answer,
}

#[derive(Debug)]
pub(super) enum Answer {
    Measured(&'static [Claim]),
    /// The reason why it is not measured.
    NotMeasured(&'static str),
}

/// A claim of the paper, and the corresponding measurement.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) what: &'static str,
    pub(super) theirs: Theirs,
    /// The place in the paper.
    pub(super) place: &'static str,
    pub(super) kind: Kind,
    /// The arguments of `shunt bench`.
    pub(super) command: &'static str,
    /// The beginning of the table's title.
    pub(super) table: &'static str,
    pub(super) lines: Lines,
    pub(super) quantity: Quantity,
    pub(super) form: Form,
}

/// The paper's figures, in the claim's form.
#[derive(Clone, Copy, Debug)]
pub(super) enum Theirs {
    Between(f64, f64),
    About(f64),
    AtLeast(f64),
    UpTo(f64),
    /// A figure for each position on the axis.
    Each(&'static [(f64, f64)]),
    /// No figure in the text.
    Words(&'static str),
}

/// The kind of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A gain.
    Gain,
    /// A cost.
    Cost,
    /// A fact without either.
    Fact,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Lines {
    All,
    Only(&'static [&'static str]),
    /// A range of the axis.
    Span(f64, f64),
}

/// The way in which the sides' figures are combined, within each round.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    /// The speed of the first relative to the second.
    TimesAsFast(&'static str, &'static str),
    /// The figure of the first relative to the second.
    PartOf(&'static str, &'static str),
    /// The relative excess of the first over the second.
    Beyond(&'static str, &'static str),
    /// The relative saving of the first against the second.
    Saves(&'static str, &'static str),
    /// The figure of one side.
    Of(&'static str),
}

impl Exhibit {
    pub(super) fn claims(&self) -> &'static [Claim] {
        match self.answer {
            Answer::Measured(claims) => claims,
            Answer::NotMeasured(_) => &[],
        }
    }
}

impl Claim {
    /// Returns true if the claim is about this line of a table.
    pub(super) fn is_about(&self, point: &Point) -> bool {
        let is_line = match self.lines {
            Lines::All => true,
            Lines::Only(lines) => lines.contains(&point.line.as_str()),
            Lines::Span(from, to) => point.at.is_some_and(|(_, x)| (from..=to).contains(&x)),
        };
        is_line && point.quantity == self.quantity && point.table.starts_with(self.table)
    }
}

impl Form {
    /// Returns the side of the claim, and the side that it is compared with.
    pub(super) fn sides(self) -> (&'static str, Option<&'static str>) {
        match self {
            Form::TimesAsFast(side, than)
            | Form::PartOf(side, than)
            | Form::Beyond(side, than)
            | Form::Saves(side, than) => (side, Some(than)),
            Form::Of(side) => (side, None),
        }
    }

    /// Returns the combined figure of one round.
    pub(super) fn of(self, quantity: Quantity, side: f64, other: f64) -> f64 {
        match self {
            Form::TimesAsFast(..) if quantity.more_is_better => side / other,
            Form::TimesAsFast(..) => other / side,
            Form::PartOf(..) => side / other,
            Form::Beyond(..) => side - other,
            Form::Saves(..) => other - side,
            Form::Of(_) => side,
        }
    }

    /// Returns the figure for two equal sides.
    pub(super) fn neutral(self) -> Option<f64> {
        match self {
            Form::TimesAsFast(..) | Form::PartOf(..) => Some(1.0),
            Form::Beyond(..) | Form::Saves(..) => Some(0.0),
            Form::Of(_) => None,
        }
    }

    /// Returns true if a greater figure is better for the claim's side.
    pub(super) fn more_is_better(self, quantity: Quantity) -> bool {
        matches!(self, Form::TimesAsFast(..) | Form::Saves(..)) || quantity.more_is_better
    }

    /// Formats a figure with its unit.
    pub(super) fn show(self, quantity: Quantity, figure: &str) -> String {
        match self {
            Form::TimesAsFast(..) | Form::PartOf(..) => format!("{figure}x"),
            Form::Beyond(..) | Form::Saves(..) | Form::Of(_) => format!("{figure} {}", quantity.label.trim()),
        }
    }
}
