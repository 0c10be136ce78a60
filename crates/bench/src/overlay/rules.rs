//! Measures what policies with few and with many rules cost the router, without connections.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use shunt_overlay::{Cost, measure_policy};

use crate::report::TextLine;

/// The numbers of rules, and of the containers that they select.
const RULES: [usize; 3] = [5, 500, 5_000];
const CONTAINERS: usize = 2_000;

/// The results by the number of rules.
#[derive(Debug, Serialize)]
pub(super) struct Rules(Vec<OfPolicy>);

/// A line of the table: its label and its figure.
type Line = (&'static str, fn(&OfPolicy) -> f64);

#[derive(Debug, Serialize)]
struct OfPolicy {
    rules: usize,
    containers: usize,
    connections: usize,
    verdict_ns: u64,
    verdict_unknown_ns: u64,
    compile_us: u64,
    change_us: u64,
    change_on_the_routers_thread_us: u64,
    published_bytes: usize,
}

pub(super) fn measure() -> Result<Rules> {
    let of = |rules| measure_policy(rules, CONTAINERS).map(OfPolicy::of);
    let all = RULES.into_iter().map(of).collect::<Result<_, _>>();
    Ok(Rules(all.context("asking the kernel for sockets")?))
}

impl OfPolicy {
    fn of(cost: Cost) -> OfPolicy {
        let micros = |it: Duration| it.as_micros() as u64;
        OfPolicy {
            rules: cost.rules,
            containers: cost.containers,
            connections: cost.connections,
            verdict_ns: cost.verdict.as_nanos() as u64,
            verdict_unknown_ns: cost.unknown.as_nanos() as u64,
            compile_us: micros(cost.compile),
            change_us: micros(cost.change),
            change_on_the_routers_thread_us: micros(cost.replace),
            published_bytes: cost.published,
        }
    }
}

impl Rules {
    pub(super) fn write(&self, out: &mut String) {
        let Rules(all) = self;
        let Some(OfPolicy { containers, connections, .. }) = all.first() else { return };
        let _ = writeln!(
            out,
            "\na policy of the router, with {containers} containers that it selects by labels, and {connections} connections (processor time)"
        );
        TextLine::new("rules", 46).cells(10, all.iter().map(|it| it.rules)).end(out);
        let lines: [Line; 6] = [
            ("a verdict (us)", |it| it.verdict_ns as f64 / 1e3),
            ("a verdict, labels not known (us)", |it| it.verdict_unknown_ns as f64 / 1e3),
            ("a container's labels change (ms)", |it| it.change_us as f64 / 1e3),
            ("  of which on the router's thread (ms)", |it| it.change_on_the_routers_thread_us as f64 / 1e3),
            ("another policy, compiled (ms)", |it| it.compile_us as f64 / 1e3),
            ("published for the broker (KB)", |it| it.published_bytes as f64 / 1e3),
        ];
        for (label, figure) in lines {
            TextLine::new(label, 46).cells(10, all.iter().map(|it| format!("{:.2}", figure(it)))).end(out);
        }
    }
}
