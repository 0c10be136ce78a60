//! `shunt serve builtin:http-proxy` against nginx and HAProxy as proxies, each with one thread. The
//! backend is nginx. A thread with many connections fetches files of one size, over connections
//! that stay open.
//!
//! `static` compares what answers static content without a backend: nginx with the file, nginx's
//! proxy_cache, and the cache of the proxy.
//!
//! Two sides are controls. One is nginx once more, which shows how far two equal programs differ. The
//! other one is the *floor*: a program of a few lines that only receives and sends each message. What it
//! takes is the least that a server with epoll can take.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use shunt_bench_args::serve::Arguments;

use super::closed::Closed;
use super::load::{Sample, connect};
use super::side::{BACKEND, REPLY, Side, nginx};
use super::way::{ADDRESS, Stage};
use crate::comparison::take_turns;
use crate::nginx::{LARGE, SMALL, write_files};
use crate::process::{Times, trees};
use crate::progress::Progress;
use crate::report::TextLine;
use crate::stats::Spread;

/// The connections of the load.
const CLIENTS: usize = 50;

/// A comparison: its sides and the files. The first two sides are equal, and shunt's is the last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contest {
    name: &'static str,
    title: &'static str,
    sides: &'static [Side],
    files: &'static [(&'static str, usize)],
}

/// The proxies.
pub(super) const PROXIES: Contest = Contest {
    name: "proxy",
    title: "HTTP proxy",
    sides: &[Side::Nginx, Side::NginxAgain, Side::Haproxy, Side::FloorForwarder, Side::Shunt],
    files: &[SMALL, LARGE],
};

/// Static content.
pub(super) const STATIC: Contest = Contest {
    name: "static",
    title: "Static content",
    sides: &[Side::NginxFile, Side::NginxFileAgain, Side::NginxCache, Side::FloorServer, Side::ShuntCache],
    files: &[SMALL],
};

impl Contest {
    /// Returns the number of turns in a round.
    pub(super) fn turns(self) -> usize {
        self.files.len() * self.sides.len()
    }
}

/// The samples of one file's size.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    of: &'static str,
    bytes: usize,
    /// The sides that were measured with these files. Shunt's is the last.
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    side: Side,
    rate: Spread,
    p50_us: Spread,
    /// Processor time of the proxy for each request.
    processor_us: Spread,
    /// Ratios of this side to the first one within each round.
    to_first_rate: Spread,
    to_first_processor: Spread,
    /// Ratios of shunt to this side within each round.
    shunt_to_rate: Spread,
    shunt_to_processor: Spread,
}

/// Measures all sizes.
pub(super) fn measure(
    contest: Contest,
    arguments: &Arguments,
    stage: &Stage,
    progress: &Progress,
) -> Result<Vec<Row>> {
    let sides = contest.sides;
    let directory = stage.path("backend");
    write_files(&directory)?;
    let http = format!(
        "open_file_cache max=10; server {{ listen 127.0.0.1:{BACKEND} backlog=4096; root {}; }}",
        directory.display()
    );
    let _backend = stage.launch(nginx(stage, &directory, &http)?, "the backend", BACKEND)?;
    std::fs::write(stage.path(REPLY), stage.namespace.inside(reply)?)?;
    let row = |(name, bytes): (&str, usize)| {
        let turn = |side: usize| {
            // It has no place for more, and others forward these without copying them.
            if sides[side] == Side::FloorForwarder && bytes > SMALL.1 {
                return Ok(None);
            }
            let command = sides[side].command(stage)?;
            let proxy = stage.launch(command, sides[side].label(), ADDRESS.port())?;
            let id = proxy.id();
            // The length of an Age changes after ten seconds.
            let time = arguments.time().min(LONGEST);
            stage.namespace.inside(|| fetch(name, bytes, time, id)).map(Some)
        };
        let label = format!("{}, {bytes} B", contest.name);
        let labels: Vec<&str> = sides.iter().map(|side| side.label()).collect();
        let samples = take_turns(progress, arguments.output.repeats, &label, &labels, turn)?;
        Row::of(contest, bytes, &samples).context("each side has samples")
    };
    contest.files.iter().copied().map(row).collect()
}

/// The longest turn.
const LONGEST: Duration = Duration::from_secs(8);

/// Returns the backend's reply with the small file.
fn reply() -> Result<Vec<u8>> {
    let (mut stream, mut buffer) = (TcpStream::connect(("127.0.0.1", BACKEND))?, vec![0; 1 << 16]);
    stream.write_all(request(SMALL.0).as_bytes())?;
    let length = read_first(&mut stream, &mut buffer, SMALL.1)?;
    buffer.truncate(length);
    Ok(buffer)
}

fn request(name: &str) -> String {
    format!("GET /{name} HTTP/1.1\r\nHost: localhost\r\n\r\n")
}

/// Fetches a file for `time` over all connections.
fn fetch(name: &str, bytes: usize, time: Duration, proxy: u32) -> Result<Sample> {
    let request = request(name);
    let (mut streams, mut buffer, mut length) = (Vec::new(), vec![0; 1 << 18], 0);
    for _ in 0..CLIENTS {
        let mut stream = connect()?;
        stream.write_all(request.as_bytes())?;
        // The first reply of a cache is the backend's, without an age.
        read_first(&mut stream, &mut buffer, bytes)?;
        stream.write_all(request.as_bytes())?;
        // Each side's replies have the same length from now on.
        length = read_first(&mut stream, &mut buffer, bytes)?;
        streams.push(stream);
    }
    let load = Closed { server: "proxy", length, outstanding: 1, time };
    let processes = trees(&[proxy]);
    load.run(
        streams,
        || Times::of(|stat| processes.contains(&stat.pid)),
        |_, next| next.extend(request.as_bytes()),
    )
}

/// Reads a reply whose body has this length, and returns its length with the head. The buffer has it
/// from its start if there is room. Otherwise later pieces overwrite the first ones.
fn read_first(stream: &mut TcpStream, buffer: &mut [u8], body: usize) -> Result<usize> {
    let (mut got, mut head) = (0, None);
    while head.is_none_or(|head| got < head + body) {
        let at = if got < buffer.len() { got } else { 0 };
        let read = stream.read(&mut buffer[at..])?;
        ensure!(read > 0, "the proxy closed a connection");
        got += read;
        if head.is_none() {
            ensure!(buffer.starts_with(b"HTTP/1.1 200 "), "the proxy does not serve the file");
            let end = buffer[..got].windows(4).position(|end| end == b"\r\n\r\n");
            head = Some(end.context("a head arrives in one piece")? + 4);
        }
    }
    Ok(got)
}

impl Row {
    /// Returns true if it belongs to a comparison.
    pub(super) fn is_of(&self, contest: Contest) -> bool {
        self.of == contest.name
    }

    fn of(contest: Contest, bytes: usize, samples: &[Vec<Sample>]) -> Option<Row> {
        let (rate, processor) =
            (|sample: &Sample| sample.rate, |sample: &Sample| sample.processor_us.max(0.01));
        let [first, .., shunt] = samples else { return None };
        let cell = |(side, samples): (Side, &Vec<Sample>)| {
            Some(Cell {
                side,
                rate: Spread::of(samples.iter().map(rate))?,
                p50_us: Spread::of(samples.iter().map(|sample| sample.p50_us))?,
                processor_us: Spread::of(samples.iter().map(processor))?,
                to_first_rate: Spread::of_ratios(samples, first, rate)?,
                to_first_processor: Spread::of_ratios(samples, first, processor)?,
                shunt_to_rate: Spread::of_ratios(shunt, samples, rate)?,
                shunt_to_processor: Spread::of_ratios(shunt, samples, processor)?,
            })
        };
        let cells = contest.sides.iter().copied().zip(samples).filter_map(cell).collect();
        Some(Row { of: contest.name, bytes, cells })
    }
}

/// Appends the tables of a comparison.
pub(super) fn write(contest: Contest, rows: &[Row], out: &mut String) {
    let to_first = contest.sides.first().map(|first| format!("to {}", first.label())).unwrap_or_default();
    for Row { bytes, cells, .. } in rows.iter().filter(|row| row.is_of(contest)) {
        let _ = writeln!(out, "\n{} of {bytes} B, {CLIENTS} connections, one thread", contest.title);
        let ratios = [to_first.as_str(), "shunt to it"];
        let head = TextLine::new("", 20).cells(12, ["requests/s"]).cells(20, ratios);
        head.cells(16, ["processor, us"]).cells(20, ratios).end(out);
        for (at, cell) in cells.iter().enumerate() {
            let is_shunt = Some(&cell.side) == contest.sides.last();
            let ratios = |to_first: Spread, shunt_to: Spread| {
                let to_first = if at == 0 { String::new() } else { to_first.as_ratio() };
                [to_first, if is_shunt { String::new() } else { shunt_to.as_ratio() }]
            };
            let line = TextLine::new(cell.side.label(), 20).cells(12, [format!("{:.0}", cell.rate.median)]);
            let line = line.cells(20, ratios(cell.to_first_rate, cell.shunt_to_rate));
            let line = line.cells(16, [format!("{:.1}", cell.processor_us.median)]);
            line.cells(20, ratios(cell.to_first_processor, cell.shunt_to_processor)).end(out);
        }
    }
}
