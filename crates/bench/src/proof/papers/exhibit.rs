//! What a paper shows: a figure, a table or a passage with figures, what it says there, and what of ours answers that.

use crate::comparison::{Point, Quantity};

/// One of the papers.
#[derive(Debug)]
pub(super) struct Paper {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) exhibits: &'static [Exhibit],
}

/// See the module.
#[derive(Debug)]
pub(super) struct Exhibit {
    /// As the paper calls it.
    pub(super) name: &'static str,
    pub(super) shows: &'static str,
    pub(super) answer: Answer,
}

#[derive(Debug)]
pub(super) enum Answer {
    Measured(&'static [Claim]),
    /// Why not.
    NotMeasured(&'static str),
}

/// Something that the paper found, and where ours stands.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) what: &'static str,
    pub(super) theirs: Theirs,
    /// Where in the paper that is said.
    pub(super) place: &'static str,
    pub(super) kind: Kind,
    /// What follows `shunt bench`.
    pub(super) command: &'static str,
    /// How the title of the table begins.
    pub(super) table: &'static str,
    pub(super) lines: Lines,
    pub(super) quantity: Quantity,
    pub(super) form: Form,
}

/// In the claim's form.
#[derive(Clone, Copy, Debug)]
pub(super) enum Theirs {
    Between(f64, f64),
    About(f64),
    AtLeast(f64),
    UpTo(f64),
    /// By where a line stands on its axis.
    Each(&'static [(f64, f64)]),
    /// No figure in the text.
    Words(&'static str),
}

/// What it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// What is gained.
    Gain,
    /// What is lost.
    Cost,
    /// What there is without either.
    Fact,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Lines {
    All,
    Only(&'static [&'static str]),
    /// From here to there on the axis.
    Span(f64, f64),
}

/// What is made of the sides' figures, round by round.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    /// How many times as fast one is as the other.
    TimesAsFast(&'static str, &'static str),
    /// One's figure in parts of the other's.
    PartOf(&'static str, &'static str),
    /// How much more the one has than the other.
    Beyond(&'static str, &'static str),
    /// How much less.
    Saves(&'static str, &'static str),
    /// The figure of one.
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
    /// Whether it is about this line of a table.
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
    /// The side that it is about, and what that is compared with.
    pub(super) fn sides(self) -> (&'static str, Option<&'static str>) {
        match self {
            Form::TimesAsFast(side, than)
            | Form::PartOf(side, than)
            | Form::Beyond(side, than)
            | Form::Saves(side, than) => (side, Some(than)),
            Form::Of(side) => (side, None),
        }
    }

    /// Of one round.
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

    /// What it is where both sides are the same.
    pub(super) fn neutral(self) -> Option<f64> {
        match self {
            Form::TimesAsFast(..) | Form::PartOf(..) => Some(1.0),
            Form::Beyond(..) | Form::Saves(..) => Some(0.0),
            Form::Of(_) => None,
        }
    }

    /// Whether the side that it is about is the better the greater this is.
    pub(super) fn more_is_better(self, quantity: Quantity) -> bool {
        matches!(self, Form::TimesAsFast(..) | Form::Saves(..)) || quantity.more_is_better
    }

    /// A figure with its unit.
    pub(super) fn show(self, quantity: Quantity, figure: &str) -> String {
        match self {
            Form::TimesAsFast(..) | Form::PartOf(..) => format!("{figure}x"),
            Form::Beyond(..) | Form::Saves(..) | Form::Of(_) => format!("{figure} {}", quantity.label.trim()),
        }
    }
}
