//! The description of a paper's exhibits: a figure, a table or a passage with its claims, and the
//! measurements that correspond to them.
//!
//! The papers are data, one file each beside this one. They are read once, and kept until this
//! program ends, so their texts are `'static`. A claim in such a file:
//!
//! ```toml
//! [[exhibits.claims]]
//! what = "throughput, overlay to host"
//! theirs = { about = [14.0, 26.8] }          # a ratio of two figures of the paper
//! place = "Table 2"
//! kind = "fact"
//! command = "overlay"
//! table = "throughput"
//! quantity = "megabytes"
//! form = { part-of = ["VXLAN", "host"] }
//! ```

use std::sync::LazyLock;

use serde::Deserialize;
use serde::de::{Deserializer, Error};

use crate::comparison::{Point, Quantity};

/// The papers, in the order of shunt's transports.
pub(super) static PAPERS: LazyLock<Vec<Paper>> = LazyLock::new(|| {
    const FILES: [&str; 5] = [
        include_str!("slipstream.toml"),
        include_str!("slim.toml"),
        include_str!("inferno.toml"),
        include_str!("slick.toml"),
        include_str!("ktcp.toml"),
    ];
    FILES.map(|text| toml::from_str(text).expect("a test reads these files")).into()
});

/// A text of a paper's file.
type Text = &'static str;

/// A paper.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Paper {
    #[serde(deserialize_with = "text")]
    pub(super) name: Text,
    #[serde(deserialize_with = "text")]
    pub(super) title: Text,
    pub(super) exhibits: Vec<Exhibit>,
}

/// An exhibit of a paper.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Exhibit {
    /// The name in the paper.
    #[serde(deserialize_with = "text")]
    pub(super) name: Text,
    #[serde(deserialize_with = "text")]
    pub(super) shows: Text,
    #[serde(default)]
    pub(super) claims: Vec<Claim>,
    /// The reason why it is not measured, if there are no claims.
    #[serde(default, deserialize_with = "some_text")]
    pub(super) not_measured: Option<Text>,
}

/// A claim of the paper, and the corresponding measurement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Claim {
    #[serde(deserialize_with = "text")]
    pub(super) what: Text,
    pub(super) theirs: Theirs,
    /// The place in the paper, or nothing.
    #[serde(default, deserialize_with = "text")]
    pub(super) place: Text,
    pub(super) kind: Kind,
    /// The arguments of `shunt bench`.
    #[serde(deserialize_with = "text")]
    pub(super) command: Text,
    /// The beginning of the table's title.
    #[serde(deserialize_with = "text")]
    pub(super) table: Text,
    #[serde(default)]
    pub(super) lines: Lines,
    #[serde(deserialize_with = "quantity")]
    pub(super) quantity: Quantity,
    pub(super) form: Form,
}

/// The paper's figures, in the claim's form.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Theirs {
    Between(#[serde(deserialize_with = "figure")] f64, #[serde(deserialize_with = "figure")] f64),
    About(#[serde(deserialize_with = "figure")] f64),
    AtLeast(#[serde(deserialize_with = "figure")] f64),
    UpTo(#[serde(deserialize_with = "figure")] f64),
    /// A figure for each position on the axis.
    Each(#[serde(deserialize_with = "figures")] &'static [(f64, f64)]),
    /// No figure in the text.
    Words(#[serde(deserialize_with = "text")] Text),
}

/// The kind of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// A gain.
    Gain,
    /// A cost.
    Cost,
    /// A fact without either.
    Fact,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Lines {
    #[default]
    All,
    Only(#[serde(deserialize_with = "texts")] &'static [Text]),
    /// A range of the axis.
    Span(f64, f64),
}

/// The way in which the sides' figures are combined, within each round.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Form {
    /// The speed of the first relative to the second.
    TimesAsFast(#[serde(deserialize_with = "text")] Text, #[serde(deserialize_with = "text")] Text),
    /// The figure of the first relative to the second.
    PartOf(#[serde(deserialize_with = "text")] Text, #[serde(deserialize_with = "text")] Text),
    /// The relative excess of the first over the second.
    Beyond(#[serde(deserialize_with = "text")] Text, #[serde(deserialize_with = "text")] Text),
    /// The relative saving of the first against the second.
    Saves(#[serde(deserialize_with = "text")] Text, #[serde(deserialize_with = "text")] Text),
    /// The figure of one side.
    Of(#[serde(deserialize_with = "text")] Text),
}

fn text<'de, D: Deserializer<'de>>(from: D) -> Result<Text, D::Error> {
    Ok(String::deserialize(from)?.leak())
}

fn some_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Text>, D::Error> {
    text(from).map(Some)
}

fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<&'static [Text], D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    Ok(texts.into_iter().map(|text| &*text.leak()).collect::<Vec<_>>().leak())
}

/// A figure of a paper, or the ratio of two of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Figure {
    One(f64),
    Ratio(f64, f64),
}

impl Figure {
    fn value(self) -> f64 {
        match self {
            Figure::One(figure) => figure,
            Figure::Ratio(figure, of) => figure / of,
        }
    }
}

fn figure<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Figure::deserialize(from)?.value())
}

fn figures<'de, D: Deserializer<'de>>(from: D) -> Result<&'static [(f64, f64)], D::Error> {
    let figures = Vec::<(f64, Figure)>::deserialize(from)?;
    Ok(figures.into_iter().map(|(at, figure)| (at, figure.value())).collect::<Vec<_>>().leak())
}

fn quantity<'de, D: Deserializer<'de>>(from: D) -> Result<Quantity, D::Error> {
    let name = String::deserialize(from)?;
    Quantity::named(&name).ok_or_else(|| D::Error::custom(format!("no quantity is called {name}")))
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
