//! Computes the report's figures from the turns of the user's pair.

use serde::Serialize;
use shunt_abi::reason::Reason;

use super::look::{Cause, Kept};
use super::pair::Turn;
use super::surroundings::Surroundings;
use crate::coverage::Coverage;
use crate::report::number;
use crate::stats::Spread;

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(rename = "machine")]
    pub(super) surroundings: Surroundings,
    pub(super) program: String,
    pub(super) load: String,
    /// The command that creates this report.
    pub(super) command: String,
    pub(super) rounds: u32,
    pub(super) seconds_in_all: f64,
    pub(super) verdict: Verdict,
    /// Failures, above all those that occur only under shunt.
    pub(super) findings: Vec<String>,
    /// Notes that a reader needs to judge the figures.
    pub(super) notes: Vec<String>,
    /// The figures. The first one decides the verdict.
    pub(super) figures: Vec<Figure>,
    pub(super) memory: Option<Memory>,
    /// The coverage of all turns under shunt.
    pub(super) coverage: Coverage,
    /// The share of the bytes that used shared memory.
    pub(super) on_shm: f64,
    /// The reasons for the rest.
    pub(super) by_tcp: Vec<ByTcp>,
    /// Programs that cannot use shared memory at all.
    pub(super) kept: Vec<Kept>,
    /// The messages of `shunt run`.
    pub(super) said: Vec<String>,
    pub(super) native: SideReport,
    pub(super) shunt: SideReport,
}

/// The result in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    /// Better in every round.
    Gains,
    /// Worse in every round.
    Loses,
    /// The rounds differ.
    NoClearDifference,
    /// No turn under shunt succeeded.
    Fails,
}

#[derive(Debug, Serialize)]
pub(super) struct Figure {
    pub(super) label: String,
    pub(super) unit: String,
    pub(super) lower_is_better: bool,
    /// The figure has a meaning without others.
    pub(super) is_whole: bool,
    pub(super) native: Spread,
    pub(super) shunt: Spread,
    /// The ratio within each round.
    pub(super) shunt_to_native: Spread,
    pub(super) rounds: Vec<[f64; 2]>,
}

/// The maximum memory, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Memory {
    pub(super) native: u64,
    pub(super) shunt: u64,
}

impl Memory {
    /// The name of the figure.
    pub(super) const LABEL: &str = "Memory, the most at a time";

    /// Returns the memory on both sides, and the ratio of shunt's to the native one.
    pub(super) fn shown(self) -> [String; 3] {
        let ratio = self.shunt as f64 / self.native.max(1) as f64;
        [bytes(self.native), bytes(self.shunt), format!("{ratio:.2}x")]
    }
}

#[derive(Debug, Serialize)]
pub(super) struct ByTcp {
    /// The share of all bytes.
    pub(super) part: f64,
    #[serde(flatten)]
    pub(super) cause: Cause,
}

/// The turns of one side, and how the programs ended in them.
#[derive(Debug, Default, Serialize)]
pub(super) struct SideReport {
    pub(super) turns: usize,
    /// The different ways in which the loads ended, and below, the server after SIGTERM.
    pub(super) load_ends: Vec<String>,
    pub(super) server_ends: Vec<String>,
    pub(super) ports: Vec<u16>,
    pub(super) failures: Vec<String>,
    /// The end of the load's output in the last turn.
    pub(super) output: String,
}

/// The turns of one side.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The first turn, in which memory was measured. It does not count as a round.
    pub(super) looked: Option<Turn>,
    /// The turn of each round, or `None` if it failed.
    pub(super) rounds: Vec<Option<Turn>>,
    pub(super) failures: Vec<String>,
}

/// The context of the turns.
pub(super) struct Told {
    pub(super) program: String,
    pub(super) load: String,
    pub(super) command: String,
    pub(super) lower_is_better: bool,
    pub(super) seconds_in_all: f64,
}

impl Turns {
    fn all(&self) -> impl Iterator<Item = &Turn> {
        self.looked.iter().chain(self.rounds.iter().flatten())
    }

    fn report(&self) -> SideReport {
        let ways = |way: fn(&Turn) -> &String| once_each(self.all().map(|turn| way(turn).clone()));
        SideReport {
            turns: self.all().count(),
            load_ends: ways(|turn| &turn.load_end),
            server_ends: ways(|turn| &turn.server_end),
            ports: once_each(self.all().flat_map(|turn| turn.ports.iter().copied())),
            failures: once_each(self.failures.iter().cloned()),
            output: self.all().last().map(|turn| turn.output.clone()).unwrap_or_default(),
        }
    }
}

fn once_each<T: Ord>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut all: Vec<T> = all.collect();
    all.sort();
    all.dedup();
    all
}

impl Report {
    pub(super) fn new(surroundings: Surroundings, told: Told, native: &Turns, shunt: &Turns) -> Report {
        let figures = figures(native, shunt, told.lower_is_better);
        let coverage = Coverage::sum(shunt.all().filter_map(|turn| turn.coverage.as_ref()));
        let memory = native.looked.as_ref().zip(shunt.looked.as_ref());
        let by_tcp = coverage.reasons().into_iter().map(|(label, part)| ByTcp { part, cause: cause(label) });
        let seen = shunt.looked.as_ref().map(|turn| turn.seen.clone()).unwrap_or_default();
        let (native_report, shunt_report) = (native.report(), shunt.report());
        Report {
            surroundings,
            program: told.program,
            load: told.load,
            command: told.command,
            rounds: native.rounds.len() as u32,
            seconds_in_all: told.seconds_in_all,
            verdict: figures.first().map_or(Verdict::Fails, Figure::verdict),
            findings: findings(native, shunt, &native_report, &shunt_report),
            notes: notes(&figures, &coverage),
            memory: memory
                .map(|(native, shunt)| Memory { native: native.seen.memory, shunt: shunt.seen.memory }),
            on_shm: coverage.share(),
            by_tcp: by_tcp.collect(),
            coverage,
            kept: seen.kept,
            said: once_each(shunt.all().flat_map(|turn| turn.said.iter().cloned())),
            figures,
            native: native_report,
            shunt: shunt_report,
        }
    }

    /// Returns the verdict in a sentence.
    pub(super) fn sentence(&self) -> String {
        let Some(figure) = self.figures.first() else {
            return "Under shunt this does not work: see the findings.".to_owned();
        };
        let ratio = figure.shunt_to_native.as_ratio();
        let what = format!("{} is {ratio} of the native one", figure.label);
        match self.verdict {
            Verdict::Gains => format!("shunt gains here: {what}."),
            Verdict::Loses => format!("shunt loses here: {what}."),
            Verdict::NoClearDifference => format!("No clear difference: {what}."),
            Verdict::Fails => "Under shunt this does not work.".to_owned(),
        }
    }
}

impl Figure {
    fn of(label: String, unit: &str, lower_is_better: bool, rounds: Vec<[f64; 2]>) -> Option<Figure> {
        let side = |side: usize| Spread::of(rounds.iter().map(|round| round[side]));
        // A native figure of 0, such as the processor time of a load that waits, has no ratio.
        let ratios = rounds.iter().filter(|[native, _]| *native > 0.0).map(|[native, shunt]| shunt / native);
        Some(Figure {
            label,
            unit: unit.to_owned(),
            lower_is_better,
            is_whole: false,
            native: side(0)?,
            shunt: side(1)?,
            shunt_to_native: Spread::of(ratios)?,
            rounds,
        })
    }

    /// Returns the verdict. A difference is clear only if all rounds agree.
    pub(super) fn verdict(&self) -> Verdict {
        let Spread { min, max, .. } = self.shunt_to_native;
        let (is_less, is_more) = (max < 1.0, min > 1.0);
        match (is_less, is_more, self.lower_is_better) {
            (true, _, true) | (_, true, false) => Verdict::Gains,
            (true, _, false) | (_, true, true) => Verdict::Loses,
            _ => Verdict::NoClearDifference,
        }
    }

    /// Returns a factor that makes the figure readable, with the resulting unit.
    pub(super) fn scale(&self) -> (f64, String) {
        scale(self.native.median.max(self.shunt.median), &self.unit)
    }
}

/// Returns a factor for a figure of about this size, with the resulting unit.
pub(super) fn scale(size: f64, unit: &str) -> (f64, String) {
    let (factor, prefix) = match unit {
        "s" if size < 1e-3 => (1e6, "u"),
        "s" if size < 1.0 => (1e3, "m"),
        "B" | "B/s" | "b/s" | "bps" if size >= 1e9 => (1e-9, "G"),
        "B" | "B/s" | "b/s" | "bps" if size >= 1e6 => (1e-6, "M"),
        _ => (1.0, ""),
    };
    (factor, format!("{prefix}{unit}"))
}

const WALL: &str = "Time of the load";
/// In seconds: the start of a shorter load matters for its figures.
const SHORT: f64 = 1.0;

/// Formats a share in per cent.
pub(super) fn percent(part: f64) -> String {
    format!("{:.1}%", part * 100.0)
}

/// Formats a number of bytes.
pub(super) fn bytes(bytes: u64) -> String {
    format!("{} MB", number(bytes as f64 / 1e6))
}

/// Computes the figures from the rounds in which both sides succeeded.
fn figures(native: &Turns, shunt: &Turns, metric_lower: bool) -> Vec<Figure> {
    let rounds: Vec<(&Turn, &Turn)> = native
        .rounds
        .iter()
        .zip(&shunt.rounds)
        .filter_map(|(one, other)| one.as_ref().zip(other.as_ref()))
        .collect();
    let of = |pick: &dyn Fn(&Turn) -> f64| {
        rounds.iter().map(|(native, shunt)| [pick(native), pick(shunt)]).collect::<Vec<_>>()
    };
    let value = |turn: &Turn| turn.metric.as_ref().map_or(0.0, |reading| reading.value);
    let cpu = |turn: &Turn| turn.server_cpu + turn.load_cpu + turn.broker_cpu;
    let time = |label: &str, pick: &dyn Fn(&Turn) -> f64| Figure::of(label.to_owned(), "s", true, of(pick));
    let metric = rounds
        .first()
        .and_then(|(turn, _)| turn.metric.as_ref())
        .and_then(|reading| Figure::of(reading.label.clone(), &reading.unit, metric_lower, of(&value)));
    // A load that runs for a fixed time does more work under shunt, so its processor time alone has
    // no meaning.
    let work = metric.as_ref().filter(|_| !metric_lower).and_then(|_| {
        let label = "Processor time of all, for the same work".to_owned();
        let first = rounds.first().map(|(turn, _)| value(turn) * turn.wall)?;
        Figure::of(label, "s", true, of(&|turn| cpu(turn) / (value(turn) * turn.wall) * first))
    });
    let is_whole = |is_whole, figure: Option<Figure>| figure.map(|figure| Figure { is_whole, ..figure });
    let is_of_fixed_time = work.is_some();
    [
        is_whole(true, metric),
        is_whole(!is_of_fixed_time, time(WALL, &|turn| turn.wall)),
        is_whole(true, work),
        time("Processor time of the server", &|turn| turn.server_cpu),
        time("Processor time of the load", &|turn| turn.load_cpu),
        is_whole(!is_of_fixed_time, time("Processor time of all", &cpu)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn findings(native: &Turns, shunt: &Turns, one: &SideReport, other: &SideReport) -> Vec<String> {
    let mut findings = Vec::new();
    let turns = |turns: &Turns| turns.all().count() + turns.failures.len();
    let mut failed = |side: &str, of: &Turns, report: &SideReport| {
        if !of.failures.is_empty() {
            findings.push(format!(
                "{side} {} of {} turns failed: {}",
                of.failures.len(),
                turns(of),
                report.failures.join("\n")
            ));
        }
    };
    match (native.failures.is_empty(), shunt.failures.is_empty()) {
        (true, false) => failed("ONLY UNDER SHUNT, and never natively,", shunt, other),
        _ => {
            failed("Natively, without shunt,", native, one);
            failed("Under shunt", shunt, other);
        }
    }
    if shunt.all().next().is_some() && one.server_ends != other.server_ends {
        findings.push(format!(
            "The server ends otherwise under shunt when it is sent SIGTERM: natively {}; under shunt {}",
            one.server_ends.join(", "),
            other.server_ends.join(", ")
        ));
    }
    findings
}

fn notes(figures: &[Figure], coverage: &Coverage) -> Vec<String> {
    let mut notes = Vec::new();
    if figures.iter().any(|figure| figure.label == WALL && figure.native.median < SHORT) {
        notes.push(
            "The load runs for less than a second: much of what is compared is how programs start. A longer load says more."
                .to_owned(),
        );
    }
    if !figures.is_empty() && coverage.bytes_in_all() == 0 {
        notes.push(
            "Under shunt nothing was counted: the programs have sent nothing to each other over TCP, or could not be entered."
                .to_owned(),
        );
    }
    notes
}

/// Returns the cause in the words of `shunt explain`.
fn cause(label: &str) -> Cause {
    let reason = Reason::ALL.iter().find(|reason| reason.label() == label).copied();
    let (explanation, advice) = match reason {
        Some(Reason::None) => (
            "Before a connection was first looked at, or while it was about to switch.",
            "No action needed: every connection begins on TCP.",
        ),
        Some(reason) => (reason.explanation(), reason.advice()),
        None => ("", ""),
    };
    Cause { label: label.to_owned(), explanation: explanation.to_owned(), advice: advice.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(wall: f64, cpu: f64, metric: Option<f64>) -> Turn {
        Turn {
            wall,
            server_cpu: cpu,
            load_cpu: cpu,
            broker_cpu: 0.0,
            metric: metric.map(|value| super::super::metric::Reading {
                value,
                unit: String::new(),
                label: "Requests/sec".to_owned(),
            }),
            load_end: "exit status: 0".to_owned(),
            server_end: "signal: 15 (SIGTERM)".to_owned(),
            ports: vec![80],
            coverage: None,
            seen: Default::default(),
            output: String::new(),
            said: Vec::new(),
        }
    }

    fn turns(rounds: Vec<Turn>) -> Turns {
        Turns {
            looked: rounds.first().cloned(),
            rounds: rounds.into_iter().map(Some).collect(),
            failures: Vec::new(),
        }
    }

    #[test]
    fn only_what_every_round_says_is_a_gain_or_a_loss() {
        for (natively, shunted, lower, expected) in [
            ([2.0, 2.0], [1.0, 1.5], true, Verdict::Gains),
            ([2.0, 2.0], [1.0, 1.5], false, Verdict::Loses),
            ([1.0, 1.0], [1.1, 2.0], true, Verdict::Loses),
            ([1.0, 1.0], [0.9, 2.0], true, Verdict::NoClearDifference),
        ] {
            let rounds = vec![[natively[0], shunted[0]], [natively[1], shunted[1]]];
            assert_eq!(Figure::of(String::new(), "", lower, rounds).unwrap().verdict(), expected);
        }
    }

    #[test]
    fn a_load_of_fixed_time_is_compared_by_its_work() {
        let native = turns(vec![turn(1.0, 0.5, Some(100.0)), turn(1.0, 0.5, Some(100.0))]);
        let shunt = turns(vec![turn(1.0, 0.5, Some(400.0)), turn(1.0, 0.5, Some(400.0))]);
        let figures = figures(&native, &shunt, false);
        assert_eq!((figures[0].label.as_str(), figures[0].shunt_to_native.median), ("Requests/sec", 4.0));
        let work = figures.iter().find(|figure| figure.label.contains("same work")).unwrap();
        assert_eq!((work.native.median, work.shunt.median), (1.0, 0.25));
    }

    #[test]
    fn what_fails_only_under_shunt_is_said_loudly() {
        let native = turns(vec![turn(1.0, 0.5, None)]);
        let mut shunt = turns(vec![turn(1.0, 0.5, None)]);
        assert!(findings(&native, &shunt, &native.report(), &shunt.report()).is_empty());
        shunt.failures.push("the load ended with exit status: 3".to_owned());
        let findings = findings(&native, &shunt, &native.report(), &shunt.report());
        assert!(
            findings[0].starts_with("ONLY UNDER SHUNT") && findings[0].contains("status: 3"),
            "{findings:?}"
        );
    }

    #[test]
    fn a_server_that_ends_otherwise_under_shunt_is_found() {
        let native = turns(vec![turn(1.0, 0.5, None)]);
        let other = Turn { server_end: "signal: 11 (SIGSEGV)".to_owned(), ..turn(1.0, 0.5, None) };
        let shunt = turns(vec![other]);
        let findings = findings(&native, &shunt, &native.report(), &shunt.report());
        assert!(findings[0].contains("SIGSEGV"), "{findings:?}");
    }
}
