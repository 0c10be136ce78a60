//! Measures the throughput of two connections over time, as in figure 7 of the Slim paper. Two
//! containers of one host send to a container of another as fast as possible, while the policy for
//! the first one changes.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::Group;
use super::lab::{Brief, Lab, Routers};
use super::load::ours;
use super::side::Side;
use crate::comparison::{Point, Quantity};
use crate::process::Process;
use crate::progress::Progress;
use crate::report::{Axes, Plot, Series, TextLine, number};
use crate::stage::Role;
use crate::stats::Spread;
use crate::worker::{Flowed, name, now};

/// The results.
#[derive(Debug, Serialize)]
pub(super) struct OverTime {
    seconds_per_point: f64,
    phases: Vec<Phase>,
    flows: [Flow; 2],
}

/// A phase with one policy for the first connection.
#[derive(Debug, Serialize)]
struct Phase {
    at: f64,
    label: String,
    /// The policy's limit for the first connection, in MB/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<f64>,
    /// The median of each connection, in MB/s; `None` if it had ended.
    medians: [Option<f64>; 2],
}

/// The throughput of a connection.
#[derive(Debug, Serialize)]
struct Flow {
    label: &'static str,
    /// Seconds since the beginning, and MB/s since the previous point.
    points: Vec<(f64, f64)>,
    /// The error that its program got at the end.
    ended: Option<String>,
}

const FLOWS: [&str; 2] = ["policy changes", "other container"];
/// Points of a phase.
const POINTS: usize = 8;
/// Limits and, below, the class, as a share of the first connection's unlimited throughput.
const LIMITS: [f64; 3] = [0.5, 0.25, 0.1];
const CLASS: f64 = 0.2;
/// No policy, the limits, the class, no policy again, and denied.
const PHASES: usize = LIMITS.len() + 4;

/// Returns the length of the measurement with a point every `every`.
pub(super) fn length(every: Duration) -> Duration {
    every * (PHASES * POINTS) as u32
}

/// Runs the measurement. Unsupported parts are left out with a message.
pub(super) fn measure(lab: &Lab, every: Duration, progress: &Progress) -> Result<Option<OverTime>> {
    let routers = lab.route(Side::Secure, Brief::Stay)?;
    let guest = lab.guest()?;
    let server = ours(lab, Side::Secure, &["sink", "--size", "65536"])?;
    let commands = [lab.worker(Side::Secure, Role::Client), lab.guest_worker(&guest)];
    let start = |mut command: std::process::Command| -> Result<Process> {
        command.args(["flow", "--to", &server.address, "--every", &every.as_secs_f64().to_string()]);
        Process::begun(&mut command, "a connection")
    };
    let [first, second] = commands;
    let mut running = Running {
        processes: [start(first)?, start(second)?],
        begun: now(),
        last: [(now(), 0); 2],
        over_time: OverTime {
            seconds_per_point: every.as_secs_f64(),
            phases: Vec::new(),
            flows: FLOWS.map(|label| Flow { label, points: Vec::new(), ended: None }),
        },
    };
    let paths = routers.paths()?;
    if paths.host != 2 {
        let reasons = paths.overlay;
        progress.say(&format!("left out: policy: a connection has stayed on the overlay: {reasons:?}"));
        return Ok(None);
    }
    running.go_through(lab, &routers, progress)?;
    Ok(Some(running.over_time))
}

struct Running {
    processes: [Process; 2],
    begun: f64,
    /// Each program's last report: the time, and the bytes sent.
    last: [(f64, u64); 2],
    over_time: OverTime,
}

impl Running {
    fn go_through(&mut self, lab: &Lab, routers: &Routers<'_>, progress: &Progress) -> Result<()> {
        self.phase("no policy", None, || Ok(()))?;
        let free = self.over_time.phases[0].medians[0].context("the connection has ended")?;
        let megabits = |part: f64| ((free * 8.0 * part) as u64).max(1);
        for part in LIMITS {
            let rate = megabits(part);
            let rule = rule(&format!("action = 'allow'\nrate = '{rate}mbit'"));
            self.phase(&format!("at most {rate} Mbit/s"), Some(rate), || routers.apply(&rule))?;
        }
        let rate = megabits(CLASS);
        match lab.class(rate) {
            Ok(class) => {
                let rule = rule("action = 'allow'\npriority = '1:20'");
                self.phase(&format!("class of {rate} Mbit/s"), Some(rate), || routers.apply(&rule))?;
                drop(class);
            }
            Err(error) => progress.say(&format!("left out: a class of tc: {error:#}")),
        }
        self.phase("no policy", None, || routers.apply(""))?;
        self.phase("denied", None, || routers.apply(&rule("action = 'deny'")))
    }

    fn phase(
        &mut self,
        label: &str,
        megabits: Option<u64>,
        begin: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        begin().with_context(|| label.to_owned())?;
        let at = now() - self.begun;
        let first = [self.hear_from(0, at)?, self.hear_from(1, at)?];
        // Skip the first point of a phase, which includes a part of the previous one.
        let median = |which: usize| {
            let flow = &self.over_time.flows[which];
            let rates = flow.points[first[which]..].iter().skip(1).map(|(_, rate)| *rate);
            if flow.ended.is_some() { None } else { Spread::of(rates).map(|spread| spread.median) }
        };
        let medians = [median(0), median(1)];
        let limit = megabits.map(|megabits| megabits as f64 / 8.0);
        self.over_time.phases.push(Phase { at, label: label.to_owned(), limit, medians });
        Ok(())
    }

    /// Waits until a connection has reported enough points since a moment, or has ended. Returns
    /// the index of its first point since then.
    fn hear_from(&mut self, which: usize, begin: f64) -> Result<usize> {
        let flow = &mut self.over_time.flows[which];
        let since = |flow: &Flow| flow.points.iter().filter(|(at, _)| *at >= begin).count();
        while flow.ended.is_none() && since(flow) < POINTS {
            match self.processes[which].results(Duration::ZERO)? {
                Flowed::Sent { at, bytes } => {
                    let (before, sent) = std::mem::replace(&mut self.last[which], (at, bytes));
                    flow.points.push((at - self.begun, (bytes - sent) as f64 / 1e6 / (at - before)));
                }
                Flowed::Ended(error) => flow.ended = Some(error),
            }
        }
        Ok(flow.points.len() - since(flow))
    }
}

fn point(phase: &str, flow: &'static str, quantity: Quantity, figure: Option<f64>) -> Point {
    let rounds = figure.into_iter().collect();
    Point::plain(&name(Group::Policy), phase, flow, quantity, rounds, None)
}

/// Returns a rule about the first container.
fn rule(what: &str) -> String {
    format!("[[rule]]\nname = 'first'\nfrom = ['{}']\n{what}\n", Lab::FIRST)
}

impl OverTime {
    /// Returns the throughput of each connection in each phase, and the first one's share of its
    /// limit.
    pub(super) fn points(&self) -> Vec<Point> {
        let of_phase = |phase: &Phase| {
            let rates = FLOWS.into_iter().zip(phase.medians);
            let point = |flow, quantity, rate| point(&phase.label, flow, quantity, rate);
            let part = phase.medians[0].zip(phase.limit).map(|(rate, limit)| rate / limit);
            let mut points: Vec<Point> =
                rates.map(|(flow, rate)| point(flow, Quantity::MEGABYTES, rate)).collect();
            points.extend(part.map(|part| point(FLOWS[0], Quantity::PART, Some(part))));
            points
        };
        self.phases.iter().flat_map(of_phase).collect()
    }

    /// Returns the points of every possible phase.
    #[cfg(test)]
    pub(super) fn outline() -> Vec<Point> {
        let kinds = [Quantity::MEGABYTES, Quantity::PART];
        let of_flow = |flow| kinds.map(|quantity| point("any", flow, quantity, None));
        FLOWS.into_iter().flat_map(of_flow).collect()
    }

    pub(super) fn plot(&self) -> Plot {
        let at = |(x, rate): &(f64, f64)| (*x, Spread { median: *rate, min: *rate, max: *rate });
        let series = self
            .flows
            .iter()
            .map(|flow| Series { label: flow.label, points: flow.points.iter().map(at).collect() });
        Plot {
            title: "Two containers send; the policy for one of them changes".to_owned(),
            x_label: "seconds".to_owned(),
            y_label: "MB/s".to_owned(),
            axes: Axes::Time {
                marks: self.phases.iter().map(|phase| (phase.at, phase.label.clone())).collect(),
            },
            series: series.collect(),
        }
    }

    pub(super) fn write(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "\ntwo containers of one host send to one of another, secure; the policy for one of them changes\n\
             (MB/s, medians of {} points of {} s)",
            POINTS - 1,
            self.seconds_per_point
        );
        TextLine::new("", 28).cells(22, FLOWS).end(out);
        for phase in &self.phases {
            let medians = phase.medians.map(|median| median.map_or("ended".to_owned(), number));
            let label = format!("{:5.1} s  {}", phase.at, phase.label);
            TextLine::new(label, 28).cells(22, medians).end(out);
        }
        for flow in &self.flows {
            if let Some(ended) = &flow.ended {
                let _ = writeln!(out, "  {}: its program was told {ended:?}", flow.label);
            }
        }
    }
}
