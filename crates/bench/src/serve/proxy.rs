//! `shunt serve builtin:http-proxy` against nginx and HAProxy as proxies, each with one thread. The
//! backend is nginx. A thread with many connections fetches files of one size, over connections
//! that stay open.
//!
//! `static` compares what answers static content without a backend: nginx with the file, nginx's
//! proxy_cache, and the cache of the proxy.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use shunt_bench_args::serve::Arguments;

use super::closed::Closed;
use super::load::{Sample, connect};
use super::way::{ADDRESS, PATIENCE, Stage};
use crate::comparison::take_turns;
use crate::find;
use crate::interrupt::wait_until;
use crate::nginx::{LARGE, SMALL, configure, write_files};
use crate::process::{Process, Times, trees};
use crate::progress::Progress;
use crate::report::TextLine;
use crate::stats::Spread;

/// The port of the backend.
const BACKEND: u16 = 6000;
/// The connections of the load.
const CLIENTS: usize = 50;

/// A proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Side {
    Nginx,
    Haproxy,
    Shunt,
    NginxFile,
    NginxCache,
    ShuntCache,
}

/// A comparison: its sides, of which shunt's is the last, and the files.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contest {
    name: &'static str,
    title: &'static str,
    sides: [Side; 3],
    files: &'static [(&'static str, usize)],
}

/// The proxies.
pub(super) const PROXIES: Contest = Contest {
    name: "proxy",
    title: "HTTP proxy",
    sides: [Side::Nginx, Side::Haproxy, Side::Shunt],
    files: &[SMALL, LARGE],
};

/// Static content.
pub(super) const STATIC: Contest = Contest {
    name: "static",
    title: "Static content",
    sides: [Side::NginxFile, Side::NginxCache, Side::ShuntCache],
    files: &[SMALL],
};

impl Contest {
    /// Returns the number of turns in a round.
    pub(super) fn turns(self) -> usize {
        self.files.len() * self.sides.len()
    }
}

impl Side {
    fn label(self) -> &'static str {
        match self {
            Side::Nginx => "nginx",
            Side::Haproxy => "HAProxy",
            Side::Shunt => "shunt",
            Side::NginxFile => "nginx, file",
            Side::NginxCache => "nginx, cache",
            Side::ShuntCache => "shunt, cache",
        }
    }
}

/// The samples of one file's size.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    of: &'static str,
    bytes: usize,
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    side: Side,
    rate: Spread,
    p50_us: Spread,
    /// Processor time of the proxy for each request.
    processor_us: Spread,
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
    let _backend = start(stage, nginx(stage, &directory, &http)?, "the backend", BACKEND)?;
    let row = |(name, bytes): (&str, usize)| {
        let turn = |side: usize| {
            let command = sides[side].command(stage)?;
            let proxy = start(stage, command, sides[side].label(), ADDRESS.port())?;
            let id = proxy.id();
            // The length of an Age changes after ten seconds.
            let time = arguments.time().min(LONGEST);
            stage.namespace.inside(|| fetch(name, bytes, time, id)).map(Some)
        };
        let label = format!("{}, {bytes} B", contest.name);
        let samples = take_turns(progress, arguments.output.repeats, &label, &sides.map(Side::label), turn)?;
        Row::of(contest, bytes, &samples).context("each side has samples")
    };
    contest.files.iter().copied().map(row).collect()
}

fn nginx(stage: &Stage, directory: &Path, http: &str) -> Result<Command> {
    let mut command = stage.namespace.command("nginx");
    command.args(configure(directory, http)?);
    Ok(command)
}

fn start(stage: &Stage, mut command: Command, name: &str, port: u16) -> Result<Process> {
    let process = Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()), name)?;
    let serves = || Ok(stage.namespace.inside(|| Ok(TcpStream::connect(("127.0.0.1", port))?)).is_ok());
    wait_until(PATIENCE, serves, || format!("{name} does not serve"))?;
    Ok(process)
}

impl Side {
    fn command(self, stage: &Stage) -> Result<Command> {
        let directory = stage.path(&self.label().replace(", ", "-"));
        std::fs::create_dir_all(&directory)?;
        match self {
            Side::Nginx => {
                // Bodies stay in memory, as with the others.
                let http = format!(
                    "upstream backend {{ server 127.0.0.1:{BACKEND}; keepalive 64; keepalive_requests 100000000; }}
                     server {{ listen {ADDRESS} backlog=4096; location / {{ proxy_pass http://backend;
                     proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_set_header Host $http_host;
                     proxy_set_header X-Forwarded-For $remote_addr; proxy_max_temp_file_size 0;
                     proxy_buffers 16 64k; proxy_buffer_size 64k; proxy_busy_buffers_size 128k; }} }}"
                );
                nginx(stage, &directory, &http)
            }
            Side::Haproxy => {
                let file = directory.join("haproxy.cfg");
                let text = format!(
                    "global\n nbthread 1\n maxconn 4096\ndefaults\n mode http\n timeout client 60s\n timeout server 60s\n \
                     timeout connect 5s\n option splice-auto\n option forwardfor\n http-reuse always\nfrontend clients\n \
                     bind {ADDRESS}\n default_backend files\nbackend files\n server one 127.0.0.1:{BACKEND}\n"
                );
                std::fs::write(&file, text)?;
                let mut command = stage.namespace.command("haproxy");
                command.args(["-db", "-f"]).arg(file);
                Ok(command)
            }
            Side::NginxFile => {
                let http = format!(
                    "open_file_cache max=10; server {{ listen {ADDRESS} backlog=4096; root {}; }}",
                    stage.path("backend").display()
                );
                nginx(stage, &directory, &http)
            }
            Side::NginxCache => {
                let http = format!(
                    "proxy_cache_path {}/cache keys_zone=zone:1m; open_file_cache max=10; proxy_cache zone;
                     proxy_cache_valid 200 1h; server {{ listen {ADDRESS} backlog=4096;
                     location / {{ proxy_pass http://127.0.0.1:{BACKEND}; }} }}",
                    directory.display()
                );
                nginx(stage, &directory, &http)
            }
            Side::Shunt | Side::ShuntCache => {
                let file = directory.join("proxy.toml");
                let cache = match self {
                    Side::ShuntCache => "[[route]]\npool = 'default'\ncache = { lifetime = 3600.0 }\n",
                    _ => "",
                };
                let text = format!(
                    "[health]\ninterval = 3600.0\n[[backend]]\naddress = '127.0.0.1:{BACKEND}'\n{cache}"
                );
                std::fs::write(&file, text)?;
                let mut command = stage.namespace.command(find::shunt()?);
                command.args([
                    "serve",
                    "builtin:http-proxy",
                    "--listen",
                    &ADDRESS.to_string(),
                    "--drain",
                    "0",
                ]);
                command.arg("--backends").arg(file).arg("--control").arg(stage.path("control"));
                Ok(command)
            }
        }
    }
}

/// The longest turn.
const LONGEST: Duration = Duration::from_secs(8);

/// Fetches a file for `time` over all connections.
fn fetch(name: &str, bytes: usize, time: Duration, proxy: u32) -> Result<Sample> {
    let request = format!("GET /{name} HTTP/1.1\r\nHost: localhost\r\n\r\n");
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

/// Reads a reply whose body has this length, and returns its length with the head.
fn read_first(stream: &mut TcpStream, buffer: &mut [u8], body: usize) -> Result<usize> {
    let (mut got, mut head) = (0, None);
    while head.is_none_or(|head| got < head + body) {
        let read = stream.read(buffer)?;
        ensure!(read > 0, "the proxy closed a connection");
        if head.is_none() {
            ensure!(buffer.starts_with(b"HTTP/1.1 200 "), "the proxy does not serve the file");
            let end = buffer[..read].windows(4).position(|end| end == b"\r\n\r\n");
            head = Some(end.context("a head arrives in one piece")? + 4);
        }
        got += read;
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
        let shunt = samples.last()?;
        let cell = |(side, samples): (Side, &Vec<Sample>)| {
            Some(Cell {
                side,
                rate: Spread::of(samples.iter().map(rate))?,
                p50_us: Spread::of(samples.iter().map(|sample| sample.p50_us))?,
                processor_us: Spread::of(samples.iter().map(processor))?,
                shunt_to_rate: Spread::of_ratios(shunt, samples, rate)?,
                shunt_to_processor: Spread::of_ratios(shunt, samples, processor)?,
            })
        };
        let cells: Option<Vec<Cell>> = contest.sides.into_iter().zip(samples).map(cell).collect();
        Some(Row { of: contest.name, bytes, cells: cells? })
    }
}

/// Appends the table of a comparison.
pub(super) fn write(contest: Contest, rows: &[Row], out: &mut String) {
    let [.., shunt] = contest.sides;
    let others = &contest.sides[..contest.sides.len() - 1];
    let _ = writeln!(out, "\n{}, {CLIENTS} connections, one thread (requests a second)", contest.title);
    let ratios: Vec<String> = others.iter().map(|side| format!("shunt to {}", side.label())).collect();
    TextLine::new("", 24).cells(14, contest.sides.map(Side::label)).cells(26, &ratios).end(out);
    for Row { bytes, cells, .. } in rows.iter().filter(|row| row.is_of(contest)) {
        let others = || cells.iter().filter(|cell| cell.side != shunt);
        let rates = cells.iter().map(|cell| format!("{:.0}", cell.rate.median));
        let line = TextLine::new(format!("{bytes} B"), 24).cells(14, rates);
        line.cells(26, others().map(|cell| cell.shunt_to_rate.as_ratio())).end(out);
        let times = cells.iter().map(|cell| format!("{:.1}", cell.processor_us.median));
        let line = TextLine::new("  processor time, us", 24).cells(14, times);
        line.cells(26, others().map(|cell| cell.shunt_to_processor.as_ratio())).end(out);
    }
}
