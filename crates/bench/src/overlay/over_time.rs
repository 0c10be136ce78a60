//! Two containers of one host send to one of another, by a connection each, as fast as it goes, while the policy for the first of them
//! changes: what both get over time, as figure 7 of the Slim paper has it.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::lab::{Brief, Lab, Routers};
use super::load::{Group, ours};
use super::points::name;
use super::side::Side;
use crate::comparison::{Point, Quantity};
use crate::process::Process;
use crate::progress::Progress;
use crate::report::{Axes, Plot, Series, number};
use crate::stage::Role;
use crate::stats::Spread;
use crate::worker::{BEGIN, Flowed, now};

/// What came of it.
#[derive(Debug, Serialize)]
pub(super) struct OverTime {
    seconds_per_point: f64,
    phases: Vec<Phase>,
    flows: [Flow; 2],
}

/// From when on which policy held for the first connection.
#[derive(Debug, Serialize)]
struct Phase {
    at: f64,
    label: String,
    /// MB/s that the policy leaves the first connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<f64>,
    /// MB/s of each connection; nothing where it had ended.
    medians: [Option<f64>; 2],
}

/// One connection.
#[derive(Debug, Serialize)]
struct Flow {
    label: &'static str,
    /// Seconds since the beginning, and MB/s until then.
    points: Vec<(f64, f64)>,
    /// What its program was told when it was ended.
    ended: Option<String>,
}

const FLOWS: [&str; 2] = ["policy changes", "other container"];
/// Points of a phase.
const POINTS: usize = 8;
/// Each with its part of what the first connection gets without a policy.
const LIMITS: [f64; 3] = [0.5, 0.25, 0.1];
const CLASS: f64 = 0.2;
/// Without a policy, with limits, in a class, without again, and denied.
const PHASES: usize = LIMITS.len() + 4;
/// Longer than the kernel takes on a busy machine to let a program send a little.
const LIMIT: Duration = Duration::from_secs(30);

/// How long it takes, with a point of each connection in so many seconds.
pub(super) fn length(every: Duration) -> Duration {
    every * (PHASES * POINTS) as u32
}

/// Measures it. What this machine cannot do is left out, and said.
pub(super) fn measure(lab: &Lab, every: Duration, progress: &Progress) -> Result<Option<OverTime>> {
    let routers = lab.route(Side::Secure, Brief::Stay)?;
    let guest = lab.guest()?;
    let server = ours(lab, Side::Secure, &["sink", "--size", "65536"])?;
    let commands = [lab.worker(Side::Secure, Role::Client), lab.guest_worker(&guest)];
    let start = |mut command: std::process::Command| -> Result<Process> {
        command.args(["flow", "--to", &server.address, "--every", &every.as_secs_f64().to_string()]);
        let mut process = Process::spawn_with_lines(&mut command, "a connection")?;
        process.expect(BEGIN, LIMIT)?;
        Ok(process)
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
    let roads = routers.roads()?;
    if roads.host != 2 {
        let reasons = roads.overlay;
        progress.say(&format!("left out: policy: a connection has stayed on the overlay: {reasons:?}"));
        return Ok(None);
    }
    running.go_through(lab, &routers, progress)?;
    Ok(Some(running.over_time))
}

struct Running {
    processes: [Process; 2],
    begun: f64,
    /// When each has said last how much it has sent.
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
        // The first point of a phase is partly of the one before.
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

    /// Until a connection has said enough since a moment, or has been ended. Which of its points is the first since then.
    fn hear_from(&mut self, which: usize, begin: f64) -> Result<usize> {
        let flow = &mut self.over_time.flows[which];
        let since = |flow: &Flow| flow.points.iter().filter(|(at, _)| *at >= begin).count();
        while flow.ended.is_none() && since(flow) < POINTS {
            let line = self.processes[which].line(LIMIT)?;
            match serde_json::from_str(&line).with_context(|| format!("a connection said {line:?}"))? {
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
    Point {
        table: name(Group::Policy),
        line: phase.to_owned(),
        at: None,
        side: flow,
        quantity,
        rounds: figure.into_iter().collect(),
        missing: None,
    }
}

/// About the first container.
fn rule(what: &str) -> String {
    format!("[[rule]]\nname = 'first'\nfrom = ['{}']\n{what}\n", Lab::FIRST)
}

impl OverTime {
    /// What each connection got in each phase, and the first one's part of its limit.
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

    /// Of all that any phase may have.
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
        let _ = write!(
            out,
            "\ntwo containers of one host send to one of another, secure; the policy for one of them changes\n\
             (MB/s, medians of {} points of {} s)\n{:28}",
            POINTS - 1,
            self.seconds_per_point,
            ""
        );
        for flow in &self.flows {
            let _ = write!(out, " {:>22}", flow.label);
        }
        out.push('\n');
        for phase in &self.phases {
            let _ = write!(out, "{:28}", format!("{:5.1} s  {}", phase.at, phase.label));
            for median in phase.medians {
                let _ = write!(out, " {:>22}", median.map_or("ended".to_owned(), number));
            }
            out.push('\n');
        }
        for flow in &self.flows {
            if let Some(ended) = &flow.ended {
                let _ = writeln!(out, "  {}: its program was told {ended:?}", flow.label);
            }
        }
    }
}
