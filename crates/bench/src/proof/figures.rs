//! Computes the report's figures from the turns of the user's pair.

use serde::Serialize;
use shunt_abi::reason::Reason;

use super::look::{Cause, Kept, Seen};
use super::pair::Turn;
use super::surroundings::Surroundings;
use crate::coverage::Coverage;
use crate::report::number;
use crate::stats::{ROUNDS, Spread};

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
    /// Better in every round, and by more than native turns differ.
    Gains,
    /// Worse in every round, and by more than native turns differ.
    Loses,
    /// The rounds differ, or differ no more than native turns among themselves.
    NoClearDifference,
    /// Fewer than three rounds, or no control.
    TooFewRounds,
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
    /// The control: the ratio of the second native turn of each round to the first.
    pub(super) native_to_native: Option<Spread>,
    pub(super) rounds: Vec<[f64; 2]>,
}

/// The maximum memory, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Memory {
    pub(super) native: u64,
    pub(super) shunt: u64,
    /// Of what shunt adds, the part that does not depend on connections: libshunt.so in each program,
    /// and the broker.
    pub(super) fixed: i64,
    /// The rings of a connection on shared memory, if there was one.
    pub(super) per_connection: Option<u64>,
    /// The connections on shared memory at that time.
    pub(super) connections: u64,
}

impl Memory {
    /// The name of the figure.
    pub(super) const LABEL: &str = "Memory, the most at a time";

    /// Returns the memory on both sides, and the ratio of shunt's to the native one.
    pub(super) fn shown(self) -> [String; 3] {
        let ratio = self.shunt as f64 / self.native.max(1) as f64;
        [bytes(self.native), bytes(self.shunt), format!("{ratio:.2}x")]
    }

    fn of(native: &Seen, shunt: &Seen) -> Memory {
        let fixed = shunt.memory as i64 - native.memory as i64 - shunt.ring_bytes as i64;
        let connections = shunt.connections;
        let per_connection = shunt.ring_bytes.checked_div(connections);
        Memory { native: native.memory, shunt: shunt.memory, fixed, per_connection, connections }
    }

    /// Returns what shunt adds, in a sentence.
    pub(super) fn sentence(self) -> String {
        let fixed = number_of_megabytes(self.fixed as f64);
        let each = match self.per_connection {
            Some(each) => format!(
                ", and {} MB for each of the {} connections on shared memory",
                number_of_megabytes(each as f64),
                self.connections
            ),
            None => ", whatever the number of connections (none was on shared memory)".to_owned(),
        };
        format!("shunt adds {fixed} MB for all programs and the broker together{each}.")
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
    pub(super) fn new(
        surroundings: Surroundings,
        told: Told,
        native: &Turns,
        again: &Turns,
        shunt: &Turns,
    ) -> Report {
        let figures = figures(native, again, shunt, told.lower_is_better);
        let coverage = Coverage::sum(shunt.all().filter_map(|turn| turn.coverage.as_ref()));
        let memory = native.looked.as_ref().zip(shunt.looked.as_ref());
        let by_tcp = coverage.reasons().into_iter().map(|(label, part)| ByTcp { part, cause: cause(label) });
        let seen = shunt.looked.as_ref().map(|turn| turn.seen.clone()).unwrap_or_default();
        let (mut native_report, shunt_report) = (native.report(), shunt.report());
        native_report.failures = once_each(native_report.failures.into_iter().chain(again.failures.clone()));
        let opened = shunt.all().map(|turn| turn.opened).sum();
        Report {
            surroundings,
            program: told.program,
            load: told.load,
            command: told.command,
            rounds: native.rounds.len() as u32,
            seconds_in_all: told.seconds_in_all,
            verdict: figures.first().map_or(Verdict::Fails, Figure::verdict),
            findings: findings(native, again, shunt, &native_report, &shunt_report),
            notes: notes(&figures, &coverage, opened),
            memory: memory.map(|(native, shunt)| Memory::of(&native.seen, &shunt.seen)),
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
        let control = figure
            .native_to_native
            .map(|control| format!("; a second native run was {} of the first", control.as_ratio()));
        let what = format!("{} is {ratio} of the native one{}", figure.label, control.unwrap_or_default());
        match self.verdict {
            Verdict::TooFewRounds => {
                format!("No verdict: at least {ROUNDS} rounds in which both sides worked are needed. {what}.")
            }
            Verdict::Gains => format!("shunt gains here: {what}."),
            Verdict::Loses => format!("shunt loses here: {what}."),
            Verdict::NoClearDifference => format!("No clear difference: {what}."),
            Verdict::Fails => "Under shunt this does not work.".to_owned(),
        }
    }
}

impl Figure {
    fn of(
        label: String,
        unit: &str,
        lower_is_better: bool,
        rounds: Vec<[f64; 2]>,
        control: &[[f64; 2]],
    ) -> Option<Figure> {
        let ratios = |rounds: &[[f64; 2]]| {
            // A native figure of 0, such as the processor time of a load that waits, has no ratio.
            let rounds = rounds.iter().filter(|[native, _]| *native > 0.0);
            Spread::of(rounds.map(|[native, other]| other / native))
        };
        let side = |side: usize| Spread::of(rounds.iter().map(|round| round[side]));
        Some(Figure {
            label,
            unit: unit.to_owned(),
            lower_is_better,
            is_whole: false,
            native: side(0)?,
            shunt: side(1)?,
            shunt_to_native: ratios(&rounds)?,
            native_to_native: ratios(control),
            rounds,
        })
    }

    /// Returns the verdict. A difference is clear only if all rounds agree, and if it is larger than
    /// that of native turns in any round.
    pub(super) fn verdict(&self) -> Verdict {
        let Spread { min, max, .. } = self.shunt_to_native;
        let Some(control) = self.native_to_native.filter(|_| self.rounds.len() >= ROUNDS as usize) else {
            return Verdict::TooFewRounds;
        };
        let (is_less, is_more) = (max < control.min.min(1.0), min > control.max.max(1.0));
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

fn number_of_megabytes(bytes: f64) -> String {
    let sign = if bytes < 0.0 { "-" } else { "" };
    format!("{sign}{}", number(bytes.abs() / 1e6))
}

/// Computes the figures from the rounds in which both sides succeeded.
fn figures(native: &Turns, again: &Turns, shunt: &Turns, metric_lower: bool) -> Vec<Figure> {
    let (rounds, control) = (pairs(native, shunt), pairs(native, again));
    let all = |rounds: &[(&Turn, &Turn)], pick: &dyn Fn(&Turn) -> f64| {
        rounds.iter().map(|(native, other)| [pick(native), pick(other)]).collect::<Vec<_>>()
    };
    let figure = |label: String, unit: &str, lower: bool, pick: &dyn Fn(&Turn) -> f64| {
        Figure::of(label, unit, lower, all(&rounds, pick), &all(&control, pick))
    };
    let value = |turn: &Turn| turn.metric.as_ref().map_or(0.0, |reading| reading.value);
    let cpu = |turn: &Turn| turn.server_cpu + turn.load_cpu + turn.broker_cpu;
    let time = |label: &str, pick: &dyn Fn(&Turn) -> f64| figure(label.to_owned(), "s", true, pick);
    let metric = rounds
        .first()
        .and_then(|(turn, _)| turn.metric.as_ref())
        .and_then(|reading| figure(reading.label.clone(), &reading.unit, metric_lower, &value));
    // A load that runs for a fixed time does more work under shunt, so its processor time alone has
    // no meaning.
    let work = metric.as_ref().filter(|_| !metric_lower).and_then(|_| {
        let label = "Processor time of all, for the same work".to_owned();
        let first = rounds.first().map(|(turn, _)| value(turn) * turn.wall)?;
        figure(label, "s", true, &|turn| cpu(turn) / (value(turn) * turn.wall) * first)
    });
    // Only if the load has printed it in all turns.
    let latency = |label: &str, at: usize| {
        let mut turns = rounds.iter().chain(&control).flat_map(|(one, other)| [one, other]);
        let is_there = turns.all(|turn| turn.latency[at].is_some());
        time(label, &|turn| turn.latency[at].unwrap_or(0.0)).filter(|_| is_there)
    };
    let is_whole = |is_whole, figure: Option<Figure>| figure.map(|figure| Figure { is_whole, ..figure });
    let is_of_fixed_time = work.is_some();
    [
        is_whole(true, metric),
        is_whole(!is_of_fixed_time, time(WALL, &|turn| turn.wall)),
        is_whole(true, work),
        latency("Latency, median", 0),
        latency("Latency, p99", 1),
        time("Processor time of the server", &|turn| turn.server_cpu),
        time("Processor time of the load", &|turn| turn.load_cpu),
        is_whole(!is_of_fixed_time, time("Processor time of all", &cpu)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn findings(
    native: &Turns,
    again: &Turns,
    shunt: &Turns,
    one: &SideReport,
    other: &SideReport,
) -> Vec<String> {
    let mut findings = Vec::new();
    let mut failed = |side: &str, of: &[&Turns], report: &SideReport| {
        let failures: usize = of.iter().map(|turns| turns.failures.len()).sum();
        let turns: usize = of.iter().map(|turns| turns.all().count()).sum();
        if failures > 0 {
            let said = report.failures.join("\n");
            findings.push(format!("{side} {failures} of {} turns failed: {said}", turns + failures));
        }
    };
    let natives = [native, again];
    match (natives.iter().all(|turns| turns.failures.is_empty()), shunt.failures.is_empty()) {
        (true, false) => failed("ONLY UNDER SHUNT, and never natively,", &[shunt], other),
        _ => {
            failed("Natively, without shunt,", &natives, one);
            failed("Under shunt", &[shunt], other);
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

/// Returns the rounds in which both of these sides have succeeded.
fn pairs<'a>(one: &'a Turns, other: &'a Turns) -> Vec<(&'a Turn, &'a Turn)> {
    let rounds = one.rounds.iter().zip(&other.rounds);
    rounds.filter_map(|(one, other)| one.as_ref().zip(other.as_ref())).collect()
}

/// Returns the notes. `opened` is how many TCP connections programs of this machine opened while the
/// loads ran under shunt.
fn notes(figures: &[Figure], coverage: &Coverage, opened: u64) -> Vec<String> {
    let mut notes = Vec::new();
    if figures.iter().any(|figure| figure.label == WALL && figure.native.median < SHORT) {
        notes.push(
            "The load runs for less than a second: much of what is compared is how programs start. A longer load says more."
                .to_owned(),
        );
    }
    if !figures.is_empty() && coverage.bytes_in_all() == 0 {
        let seen = match (coverage.ends.seen, opened) {
            (0, 0) => "no program of this machine opened a TCP connection while the load ran".to_owned(),
            (0, opened) => format!(
                "programs of this machine opened {opened} TCP connections while the load ran. Those under shunt were too \
                 short to be counted, and stayed on TCP (too_few_operations), or the programs could not be entered"
            ),
            (ends, opened) => format!(
                "{ends} connection ends were used, and {opened} connections opened on this machine, but the broker has no \
                 bytes of them: they ended before it counted them"
            ),
        };
        notes.push(format!("Under shunt no bytes were counted: {seen}."));
    }
    if !figures.is_empty() && !figures.iter().any(|figure| figure.label.contains("atency")) {
        notes.push(
            "The load printed no latency that this report knows; it knows those of wrk --latency, ab, hey, oha and \
             redis-benchmark. --metric finds one of any load."
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
            latency: [None; 2],
            opened: 0,
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
            let mut rounds = vec![[natively[0], shunted[0]], [natively[1], shunted[1]]];
            let verdict = |rounds: &Vec<[f64; 2]>, control: &[[f64; 2]]| {
                Figure::of(String::new(), "", lower, rounds.clone(), control).unwrap().verdict()
            };
            let control = [[1.0, 1.05], [1.0, 0.99]];
            assert_eq!(verdict(&rounds, &control), Verdict::TooFewRounds);
            rounds.push(rounds[0]);
            assert_eq!(verdict(&rounds, &control), expected);
            assert_eq!(verdict(&rounds, &[]), Verdict::TooFewRounds, "without a control");
            // Native turns differ as much.
            assert_eq!(verdict(&rounds, &[[1.0, 0.4], [1.0, 2.5]]), Verdict::NoClearDifference);
        }
    }

    #[test]
    fn a_load_of_fixed_time_is_compared_by_its_work() {
        let native = turns(vec![turn(1.0, 0.5, Some(100.0)), turn(1.0, 0.5, Some(100.0))]);
        let shunt = turns(vec![turn(1.0, 0.5, Some(400.0)), turn(1.0, 0.5, Some(400.0))]);
        let figures = figures(&native, &native, &shunt, false);
        assert_eq!((figures[0].label.as_str(), figures[0].shunt_to_native.median), ("Requests/sec", 4.0));
        let work = figures.iter().find(|figure| figure.label.contains("same work")).unwrap();
        assert_eq!((work.native.median, work.shunt.median), (1.0, 0.25));
    }

    #[test]
    fn what_fails_only_under_shunt_is_said_loudly() {
        let native = turns(vec![turn(1.0, 0.5, None)]);
        let mut shunt = turns(vec![turn(1.0, 0.5, None)]);
        assert!(findings(&native, &native, &shunt, &native.report(), &shunt.report()).is_empty());
        shunt.failures.push("the load ended with exit status: 3".to_owned());
        let findings = findings(&native, &native, &shunt, &native.report(), &shunt.report());
        assert!(
            findings[0].starts_with("ONLY UNDER SHUNT") && findings[0].contains("status: 3"),
            "{findings:?}"
        );
    }

    #[test]
    fn connections_that_were_not_counted_are_not_denied() {
        let native = turns(vec![turn(1.0, 0.5, None)]);
        let figures = figures(&native, &native, &native, false);
        let note = |coverage: &Coverage, opened| notes(&figures, coverage, opened).concat();
        assert!(note(&Coverage::default(), 0).contains("no program of this machine opened"));
        assert!(note(&Coverage::default(), 70).contains("opened 70 TCP connections"));
        let mut used = Coverage::default();
        used.ends.seen = 8;
        assert!(note(&used, 70).contains("8 connection ends were used"));
    }

    #[test]
    fn latencies_are_figures_if_all_turns_have_them() {
        let with = |latency| Turn { latency: [Some(latency), None], ..turn(1.0, 0.5, None) };
        let (native, shunt) = (turns(vec![with(2e-3), with(4e-3)]), turns(vec![with(1e-3), with(1e-3)]));
        let all = figures(&native, &native, &shunt, false);
        let latency: Vec<&Figure> = all.iter().filter(|figure| figure.label.contains("Latency")).collect();
        assert_eq!((latency.len(), latency[0].native.median, latency[0].shunt.median), (1, 3e-3, 1e-3));
        let without = turns(vec![turn(1.0, 0.5, None), with(1e-3)]);
        assert!(!figures(&native, &native, &without, false).iter().any(|one| one.label.contains("Latency")));
    }

    #[test]
    fn memory_is_what_is_fixed_and_what_each_connection_has() {
        let seen =
            |memory, ring_bytes, connections| Seen { memory, ring_bytes, connections, ..Seen::default() };
        let memory = Memory::of(&seen(10_000_000, 0, 0), &seen(18_000_000, 5_000_000, 50));
        assert_eq!((memory.fixed, memory.per_connection), (3_000_000, Some(100_000)));
        assert!(
            memory.sentence().contains("adds 3.00 MB")
                && memory.sentence().contains("0.10 MB for each of the 50")
        );
        assert_eq!(Memory::of(&seen(1, 0, 0), &seen(2, 0, 0)).per_connection, None);
    }

    #[test]
    fn a_server_that_ends_otherwise_under_shunt_is_found() {
        let native = turns(vec![turn(1.0, 0.5, None)]);
        let other = Turn { server_end: "signal: 11 (SIGSEGV)".to_owned(), ..turn(1.0, 0.5, None) };
        let shunt = turns(vec![other]);
        let findings = findings(&native, &native, &shunt, &native.report(), &shunt.report());
        assert!(findings[0].contains("SIGSEGV"), "{findings:?}");
    }
}
