//! How long each builtin service takes from its start to its first client, and until its kernel
//! half is loaded, compared with a plain program.

use std::fmt::Write;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::CACHED;
use super::load::Load;
use super::side::Side;
use super::way::{ADDRESS, Stage, Way};
use crate::comparison::take_turns;
use crate::progress::Progress;
use crate::report::{TextLine, or_dash};
use crate::stats::Spread;

/// A service, and the ways in which it is started.
struct Service {
    name: &'static str,
    plain: &'static str,
    ways: &'static [Way],
}

const SERVICES: [Service; 5] = [
    Service { name: "echo", plain: "epoll", ways: ALL },
    Service { name: "cache", plain: "memcached", ways: ALL },
    Service { name: "thrift-forwarder", plain: "libevent", ways: ALL },
    Service { name: "http-proxy", plain: "nginx", ways: &[Way::Plain, Way::Auto] },
    Service { name: "pubsub", plain: "", ways: &[Way::Auto] },
];
const ALL: &[Way] = &[Way::Plain, Way::User, Way::Kernel, Way::Auto];

/// The times of one service in one way, in milliseconds.
#[derive(Debug, Serialize)]
struct Cell {
    way: Way,
    /// Until a client is connected.
    first_client_ms: Spread,
    /// Until the kernel half is loaded, with the automatic engine.
    kernel_half_ms: Option<Spread>,
}

/// The times of one service.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    service: &'static str,
    /// The plain program.
    plain: &'static str,
    cells: Vec<Cell>,
}

#[derive(Clone, Copy)]
struct Sample {
    first_client: f64,
    kernel_half: Option<f64>,
}

/// Returns the number of turns in a round.
pub(super) fn turns() -> usize {
    SERVICES.iter().map(|service| service.ways.len()).sum()
}

/// Measures all services.
pub(super) fn measure(repeats: u32, stage: &Stage, progress: &Progress) -> Result<Vec<Row>> {
    let row = |service: &Service| {
        let labels: Vec<&str> = service.ways.iter().map(|way| way.label()).collect();
        let turn = |way: usize| start(service, service.ways[way], stage).map(Some);
        let samples = take_turns(progress, repeats, &format!("start of {}", service.name), &labels, turn)?;
        let cell = |(way, samples): (&Way, &Vec<Sample>)| {
            Some(Cell {
                way: *way,
                first_client_ms: Spread::of(samples.iter().map(|sample| sample.first_client))?,
                kernel_half_ms: Spread::of(samples.iter().filter_map(|sample| sample.kernel_half)),
            })
        };
        let cells = service.ways.iter().zip(&samples).filter_map(cell).collect();
        Ok(Row { service: service.name, plain: service.plain, cells })
    };
    SERVICES.iter().map(row).collect()
}

fn start(service: &Service, way: Way, stage: &Stage) -> Result<Sample> {
    let command = service.command(way, stage)?;
    let begun = Instant::now();
    let elapsed = || begun.elapsed().as_secs_f64() * 1e3;
    let _process = stage.launch(command, service.name, ADDRESS.port())?;
    let first_client = elapsed();
    let has_half = way == Way::Auto && service.ways.contains(&Way::Kernel);
    if !has_half {
        return Ok(Sample { first_client, kernel_half: None });
    }
    let state = stage.await_kernel_half()?;
    ensure!(state == "loaded", "the kernel half of {} is {state}", service.name);
    Ok(Sample { first_client, kernel_half: Some(elapsed()) })
}

impl Service {
    fn command(&self, way: Way, stage: &Stage) -> Result<Command> {
        match self.name {
            "echo" => stage.command(way, Load::Echo { bytes: 32, outstanding: 1 }),
            "cache" => stage.command(way, Load::Cache { bytes: CACHED, outstanding: 1 }),
            "thrift-forwarder" => stage.command(way, Load::Forward { payload: 32 }),
            "http-proxy" if way == Way::Plain => Side::Nginx.command(stage),
            "http-proxy" => Side::Shunt.command(stage),
            name => stage.serve(way, &format!("builtin:{name}")),
        }
    }
}

/// Appends the table.
pub(super) fn write(rows: &[Row], out: &mut String) {
    let _ = writeln!(out, "\nFrom the start of a service to its first client (ms)");
    let ways = ALL.iter().map(|way| way.label());
    TextLine::new("", 38).cells(22, ways).cells(26, ["auto, kernel half loaded"]).end(out);
    for row in rows {
        let cells = || ALL.iter().map(|way| row.cells.iter().find(|cell| cell.way == *way));
        let first = cells().map(|cell| or_dash(cell.map(|cell| cell.first_client_ms.shown())));
        let half = cells().flatten().find_map(|cell| cell.kernel_half_ms).map(Spread::shown);
        let plain = if row.plain.is_empty() { String::new() } else { format!(" (plain: {})", row.plain) };
        let label = format!("{}{plain}", row.service);
        TextLine::new(label, 38).cells(22, first).cells(26, [or_dash(half)]).end(out);
    }
}
