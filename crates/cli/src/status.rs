//! `shunt status`: prints the broker's snapshot as a table or as JSON, and the connections of the
//! overlay's router, if there is one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use shunt_abi::latency::Latency;
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::shown::visible;
use shunt_abi::status::{Connection, Direction, Process, Share, Snapshot};
use shunt_broker::StatusError;

use crate::args::StatusArgs;
use crate::broker;
use crate::explain::unregistered::{Unregistered, unregistered};
use crate::filter::Filter;
use crate::overlay::seen::View;
use crate::screen::{Screen, Tone};
use crate::table::{self, Column, left, right};

const COLUMNS: [Column; 11] = [
    left("PROGRAM", 0).shortened_to(10),
    right("PID", 6),
    left("LOCAL", 5),
    left("REMOTE", 1),
    left("SENDS", 2),
    right("SENT SHM", 7),
    right("SENT TCP", 9),
    left("RECEIVES", 3),
    right("RECV SHM", 8),
    right("RECV TCP", 10),
    left("WHY TCP", 4).shortened_to(12),
];

/// The columns of `--latency`.
const LATENCIES: [Column; 9] = [
    left("PROGRAM", 0).shortened_to(10),
    right("PID", 6),
    left("LOCAL", 5),
    left("REMOTE", 1),
    left("TRANSPORT", 4),
    right("REQUESTS", 7),
    right("MEAN", 8),
    right("HALF WITHIN", 3),
    right("99 % WITHIN", 2),
];

/// The columns that count connection ends: those that are open, and those since the process started.
const PROGRAMS: [Column; 9] = [
    left("PROGRAM", 0).shortened_to(10),
    right("PID", 1),
    right("OPEN: SHM", 2),
    right("MIXED", 4),
    right("TCP", 3),
    right("EVER: USED", 5),
    right("OFFERED", 7),
    right("ON SHM", 6),
    right("SHORT", 8),
];

/// The columns of programs that have ended.
const ENDED: [Column; 7] = [
    left("PROGRAM", 0).shortened_to(10),
    right("PID", 1),
    right("SECONDS AGO", 4),
    right("USED", 2),
    right("OFFERED", 6),
    right("ON SHM", 5),
    right("SHORT", 3),
];
/// The most connections that are shown after their end.
const SHOWN_ENDED: usize = 20;

pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    let overlay = View::ask(&args.control.control);
    let (mut snapshot, unregistered) = match find(args.broker.as_deref()) {
        Ok(broker) => {
            let snapshot = if args.latency { measured(&broker)? } else { shunt_broker::status(&broker)? };
            let is_known = |pid| snapshot.processes.iter().any(|process| process.pid == pid);
            // The text names these programs only if it shows everything.
            let is_wanted = args.json || args.filter.is_empty();
            let unregistered = is_wanted.then(|| unregistered(&broker, is_known));
            (Some(snapshot), unregistered)
        }
        // A host may have an overlay's router without a broker.
        Err(_) if overlay.is_some() && args.broker.is_none() => (None, None),
        Err(error) => return Err(error),
    };
    if let Some(snapshot) = &mut snapshot {
        args.filter.apply(snapshot);
    }
    // The overlay's router knows neither programs nor processes of this host's brokers.
    let overlay = overlay.filter(|_| args.filter.is_empty());
    if args.json {
        let summary = snapshot.as_ref().filter(|_| args.summary).map(Summary::of);
        if args.summary
            && let Some(snapshot) = &mut snapshot
        {
            snapshot.processes.iter_mut().for_each(|process| {
                process.connections.clear();
                process.ended_connections.clear();
            });
        }
        let all = All { snapshot, summary, unregistered, overlay };
        println!("{}", serde_json::to_string_pretty(&all).context("the snapshot cannot be printed")?);
        return Ok(());
    }
    let screen = Screen::of_output();
    let shown = snapshot.as_ref().map(|snapshot| {
        let text = render(snapshot, &args.filter, args.summary, &screen);
        if args.latency { latencies(snapshot, &screen) + "\n" + &text } else { text }
    });
    let shown =
        shown.map(|text| text + &unregistered.map(|found| not_yet(&found, &screen)).unwrap_or_default());
    let parts = [shown, overlay.as_ref().map(View::text)];
    print!("{}", parts.into_iter().flatten().collect::<Vec<_>>().join("\n"));
    Ok(())
}

/// How long programs measure for `--latency`.
const MEASURED: Duration = Duration::from_secs(2);

/// Has the programs measure, and returns a snapshot with the latencies of that time only.
fn measured(broker: &Path) -> Result<Snapshot, StatusError> {
    let before = shunt_broker::status_with_latency(broker)?;
    std::thread::sleep(MEASURED);
    let mut after = shunt_broker::status(broker)?;
    only_since(&before, &mut after);
    Ok(after)
}

/// Removes the latencies that an earlier snapshot has already.
fn only_since(before: &Snapshot, after: &mut Snapshot) {
    after.totals.latency = after.totals.latency.since(&before.totals.latency);
    for process in &mut after.processes {
        let is_it = |old: &&Process| (old.pid, &old.program) == (process.pid, &process.program);
        let Some(old) = before.processes.iter().find(is_it) else { continue };
        process.totals.latency = process.totals.latency.since(&old.totals.latency);
        let ends: HashMap<u64, &Connection> = old.connections.iter().map(|end| (end.cookie, end)).collect();
        for end in process.connections.iter_mut().chain(&mut process.ended_connections) {
            if let Some(old) = ends.get(&end.cookie) {
                end.latency = end.latency.since(&old.latency);
            }
        }
    }
}

/// Describes the latencies of the ends that have connected.
fn latencies(snapshot: &Snapshot, screen: &Screen) -> String {
    let mut rows = Vec::new();
    for process in &snapshot.processes {
        for end in process.connections.iter().filter(|end| end.connected) {
            let transport = match (end.send.transport, end.receive.transport) {
                (one, other) if one == other => one.label(),
                _ => "mixed",
            };
            let name = [printable(&process.program), process.pid.to_string()];
            let place = [end.local.to_string(), end.remote.to_string(), transport.to_owned()];
            rows.push(name.into_iter().chain(place).chain(latency_cells(&end.latency)).collect::<Vec<_>>());
        }
    }
    if rows.is_empty() {
        return "No program under shunt has an open connection that it has made itself.\n".to_owned();
    }
    rows.sort();
    let seconds = MEASURED.as_secs();
    let title = format!("Latency of requests in {seconds} seconds, at the end that has connected:\n");
    title + &screen.table(&LATENCIES, &rows, |_, cell| Tone::of_label(cell))
}

/// Returns how many latencies there are, their mean, and what half and 99 % do not exceed.
fn latency_cells(latency: &Latency) -> [String; 4] {
    if latency.is_unknown() {
        return ["unknown"; 4].map(str::to_owned);
    }
    let mean = latency.sum_nanos.checked_div(latency.count()).unwrap_or(0);
    let count = latency.count().to_string();
    [count, table::time(mean), within(latency, 0.5), within(latency, 0.99)]
}

/// Returns a time that this share of the latencies does not exceed.
pub(crate) fn within(latency: &Latency, share: f64) -> String {
    match latency.quantile(share) {
        None => "unknown".to_owned(),
        Some(Ok(nanos)) => table::time(nanos),
        Some(Err(nanos)) => format!("more than {}", table::time(nanos)),
    }
}

/// The broker's snapshot, and the view of the overlay's router, if this host has one.
#[derive(Serialize)]
struct All {
    #[serde(flatten)]
    snapshot: Option<Snapshot>,
    /// With `--summary`, instead of the connections of each process.
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Summary>,
    /// Programs under shunt that have not registered with the broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    unregistered: Option<Vec<Unregistered>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overlay: Option<View>,
}

/// The open connection ends, of all programs that are shown and of each.
#[derive(Debug, PartialEq, Serialize)]
struct Summary {
    #[serde(flatten)]
    open: Open,
    programs: Vec<OpenOf>,
}

#[derive(Debug, PartialEq, Serialize)]
struct OpenOf {
    program: String,
    pid: u32,
    #[serde(flatten)]
    open: Open,
}

/// Counts of open connection ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Open {
    on_shm: usize,
    /// One direction is on shared memory and the other on TCP.
    mixed: usize,
    on_tcp: usize,
    /// The ends with a direction on TCP, by reason. An end with two reasons counts for both.
    on_tcp_because: BTreeMap<&'static str, usize>,
}

impl Open {
    fn of<'a>(connections: impl IntoIterator<Item = &'a Connection>) -> Open {
        let mut open = Open::default();
        for end in connections {
            match (end.send.transport, end.receive.transport) {
                (Transport::Shm, Transport::Shm) => open.on_shm += 1,
                (Transport::Tcp, Transport::Tcp) => open.on_tcp += 1,
                _ => open.mixed += 1,
            }
            let reasons: BTreeSet<&str> =
                [&end.send, &end.receive].into_iter().filter_map(reason).map(Reason::label).collect();
            for reason in reasons {
                *open.on_tcp_because.entry(reason).or_default() += 1;
            }
        }
        open
    }

    fn count(&self) -> usize {
        self.on_shm + self.mixed + self.on_tcp
    }
}

impl Summary {
    fn of(snapshot: &Snapshot) -> Summary {
        let of = |process: &Process| OpenOf {
            program: process.program.clone(),
            pid: process.pid,
            open: Open::of(&process.connections),
        };
        Summary {
            open: Open::of(snapshot.processes.iter().flat_map(|process| &process.connections)),
            programs: snapshot.processes.iter().map(of).collect(),
        }
    }
}

pub(crate) fn find(asked: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = asked {
        broker::probe(path).map_err(|error| anyhow!("no broker at {}: {error}", path.display()))?;
        return Ok(path.to_owned());
    }
    broker::first_alive().ok_or_else(|| {
        let places: Vec<_> =
            shunt_broker::socket_candidates().iter().map(|path| path.display().to_string()).collect();
        anyhow!("no broker is running at {}; `shunt run -- PROGRAM` starts one", places.join(" or "))
    })
}

/// Returns the snapshot as text.
fn render(snapshot: &Snapshot, filter: &Filter, is_summary: bool, screen: &Screen) -> String {
    let mut text = if filter.is_empty() { heading(snapshot, screen) } else { String::new() };
    let connections: Vec<&Connection> =
        snapshot.processes.iter().flat_map(|process| &process.connections).collect();
    let ended = ended(snapshot, is_summary, screen);
    if snapshot.processes.is_empty() {
        let none = match filter.is_empty() {
            true if snapshot.of_all => "No program is under shunt at this broker now.".to_owned(),
            true => "No program of yours is under shunt at this broker now.".to_owned(),
            false => format!("No program under shunt at this broker fits: {}.", filter.shown()),
        };
        let _ = writeln!(text, "{none}");
        return text + &ended;
    }
    if !is_summary && !connections.is_empty() {
        let mut rows = Vec::new();
        for process in &snapshot.processes {
            for connection in &process.connections {
                rows.push(row(&printable(&process.program), process.pid, connection));
            }
        }
        rows.sort();
        let tone = |_: &Column, cell: &str| Tone::of_label(cell);
        let _ = writeln!(text, "{}", screen.table(&COLUMNS, &rows, tone));
    }
    let mut programs: Vec<_> = snapshot.processes.iter().map(program_row).collect();
    programs.sort();
    let _ = writeln!(text, "{}", screen.table(&PROGRAMS, &programs, |_, _| Tone::Plain));
    let counts = Open::of(connections.iter().copied()).on_tcp_because;
    for reason in reasons(&connections) {
        let count = counts.get(reason.label()).copied().unwrap_or(0);
        let label = screen.paint(reason.label(), Tone::Title);
        let begun = table::width(reason.label());
        let sentence = format!(": {} ({})", reason.explanation(), count_of(count, "connection end"));
        let _ = writeln!(text, "{label}{}", screen.wrap(&sentence, begun, 2));
    }
    let left_out: usize = snapshot.processes.iter().map(|process| process.left_out).sum();
    if left_out > 0 {
        let _ = writeln!(text, "{} more than fit into a status", count_of(left_out, "connection end"));
    }
    text + &ended + &totals(snapshot.processes.len(), &connections, screen)
}

/// Describes the connections of running programs, and the programs, that have ended in the last
/// minute.
fn ended(snapshot: &Snapshot, is_summary: bool, screen: &Screen) -> String {
    let mut text = String::new();
    let mut rows: Vec<_> = snapshot
        .processes
        .iter()
        .flat_map(|process| process.ended_connections.iter().map(move |connection| (process, connection)))
        .collect();
    rows.sort_by_key(|(_, connection)| connection.ended_seconds_ago);
    if !is_summary && !rows.is_empty() {
        let more = rows.len().saturating_sub(SHOWN_ENDED);
        rows.truncate(SHOWN_ENDED);
        let rows: Vec<_> = rows
            .iter()
            .map(|(process, connection)| {
                row(&printable(&process.program), process.pid, &before_its_end(connection))
            })
            .collect();
        let _ = writeln!(text, "Connections that ended in the last minute:");
        let _ = write!(text, "{}", screen.table(&COLUMNS, &rows, |_, cell| Tone::of_label(cell)));
        if more > 0 {
            let _ = writeln!(text, "and {more} more");
        }
        text.push('\n');
    }
    if !snapshot.ended_processes.is_empty() {
        let rows: Vec<_> = snapshot.ended_processes.iter().map(ended_row).collect();
        let _ = writeln!(text, "Programs that ended in the last minute:");
        let _ = writeln!(text, "{}", screen.table(&ENDED, &rows, |_, _| Tone::Plain));
    }
    text
}

/// Returns a connection as it was before it ended. At the end, all connections fall back to TCP.
fn before_its_end(connection: &Connection) -> Connection {
    let before = |direction: &Direction| match direction.shm_bytes {
        0 => *direction,
        _ => Direction { transport: Transport::Shm, reason: Reason::None, ..*direction },
    };
    let (send, receive) = (before(&connection.send), before(&connection.receive));
    Connection { send, receive, ..connection.clone() }
}

fn ended_row(process: &Process) -> Vec<String> {
    let Share { seen, offered, on_shm } = process.totals.share;
    let ago = process.ended_seconds_ago.unwrap_or(0);
    let counts = [u64::from(process.pid), ago, seen, offered, on_shm, short(process)];
    [printable(&process.program)].into_iter().chain(counts.map(|count| count.to_string())).collect()
}

/// Returns how many connections of a program ended before they could be offered.
fn short(process: &Process) -> u64 {
    process.totals.counters.get("connections_short").copied().unwrap_or(0)
}

/// Describes the programs that have not registered. Empty if there are none.
fn not_yet(programs: &[Unregistered], screen: &Screen) -> String {
    const NAMED: usize = 10;
    if programs.is_empty() {
        return String::new();
    }
    let named: Vec<_> =
        programs.iter().take(NAMED).map(|one| format!("{} ({})", printable(&one.program), one.pid)).collect();
    let rest = match programs.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let sentence = format!(
        "{} under shunt that this broker does not know: without a TCP connection so far, asleep since the broker was \
         restarted, or not able to reach it: {}{rest}",
        count_of(programs.len(), "program"),
        named.join(", ")
    );
    screen.wrap(&sentence, 0, 2) + "\n"
}

/// Describes the broker and what it has done since its start.
fn heading(snapshot: &Snapshot, screen: &Screen) -> String {
    let pairs = count_of(snapshot.links, "pair") + " of programs with shared memory";
    let pairs = match snapshot.earlier_ends {
        0 => pairs,
        ends => format!(
            "{pairs} since it was restarted (earlier pairs are unknown: they have {})",
            count_of(ends, "connection end")
        ),
    };
    let broker = format!(
        "broker {}, up {}: {pairs}, {} put on it{}",
        snapshot.broker_pid,
        table::duration(snapshot.uptime_seconds),
        count_of(snapshot.pairs_made as usize, "connection"),
        if snapshot.of_all { "" } else { "; only your own programs are shown" },
    );
    let ends = format!("connection ends so far: {}", share(&snapshot.totals.share));
    let mut text = format!("{}\n{}\n", screen.wrap(&broker, 0, 2), screen.wrap(&ends, 0, 2));
    for (what, counts) in [
        ("offers that the broker refused since the start:", &snapshot.offers_refused),
        ("connections that the broker returned to TCP since the start:", &snapshot.pairs_ended),
        ("messages that the broker could not use since the start:", &snapshot.bad_messages),
    ] {
        if !counts.is_empty() {
            let _ = writeln!(text, "{what}");
        }
        for (name, count) in counts {
            let meaning = Reason::ALL.iter().find(|reason| reason.label() == name);
            let meaning = meaning.map(|reason| format!(": {}", reason.explanation())).unwrap_or_default();
            let _ = writeln!(text, "{}", screen.wrap(&format!("  {count} times {name}{meaning}"), 0, 4));
        }
    }
    text.push('\n');
    text
}

fn share(share: &Share) -> String {
    format!(
        "{} used, {} of them offered to the broker, {} on shared memory for a time",
        share.seen, share.offered, share.on_shm
    )
}

fn program_row(process: &Process) -> Vec<String> {
    let Share { seen, offered, on_shm } = process.totals.share;
    let open = Open::of(&process.connections);
    let open = [open.on_shm, open.mixed, open.on_tcp].map(|count| count.to_string());
    let ever = [seen, offered, on_shm].map(|count| count.to_string());
    let name = [printable(&process.program), process.pid.to_string()];
    name.into_iter().chain(open).chain(ever).chain([short(process).to_string()]).collect()
}

fn row(program: &str, pid: u32, connection: &Connection) -> Vec<String> {
    let Connection { send, receive, .. } = connection;
    vec![
        program.to_owned(),
        pid.to_string(),
        connection.local.to_string(),
        connection.remote.to_string(),
        send.transport.label().to_owned(),
        table::bytes(send.shm_bytes),
        table::bytes(send.tcp_bytes),
        receive.transport.label().to_owned(),
        table::bytes(receive.shm_bytes),
        table::bytes(receive.tcp_bytes),
        why(connection),
    ]
}

/// Returns the reason, or both reasons if the two directions differ.
pub(crate) fn why(connection: &Connection) -> String {
    let label = |reason: Reason| match &connection.option {
        Some(option) if reason == Reason::SocketOption => {
            format!("{} ({})", reason.label(), printable(option))
        }
        _ => reason.label().to_owned(),
    };
    match (reason(&connection.send), reason(&connection.receive)) {
        (None, None) => String::new(),
        (Some(one), Some(other)) if one == other => label(one),
        (Some(one), Some(other)) => format!("{} / {}", label(one), label(other)),
        (Some(one), None) => format!("sends: {}", label(one)),
        (None, Some(one)) => format!("receives: {}", label(one)),
    }
}

fn reason(direction: &Direction) -> Option<Reason> {
    (direction.transport == Transport::Tcp).then_some(direction.reason)
}

fn reasons(connections: &[&Connection]) -> Vec<Reason> {
    let directions = connections.iter().flat_map(|connection| [&connection.send, &connection.receive]);
    let codes: BTreeSet<u16> = directions.filter_map(reason).map(|reason| reason as u16).collect();
    // The reason `none` on TCP means that the connection is about to switch. There is nothing to
    // explain.
    codes.into_iter().filter_map(Reason::parse).filter(|reason| *reason != Reason::None).collect()
}

fn totals(programs: usize, connections: &[&Connection], screen: &Screen) -> String {
    if connections.is_empty() {
        return format!("{}, no connection is open\n", count_of(programs, "program"));
    }
    let open = Open::of(connections.iter().copied());
    let sum = |pick: fn(&Connection) -> u64| {
        table::bytes(connections.iter().fold(0_u64, |sum, end| sum.saturating_add(pick(end))))
    };
    let mixed = match open.mixed {
        0 => String::new(),
        some => format!("{some} with one direction on each, "),
    };
    let ends = format!(
        "{} of {}: {} on shared memory (shm), {mixed}{} on TCP",
        count_of(open.count(), "open connection end"),
        count_of(programs, "program"),
        open.on_shm,
        open.on_tcp
    );
    let bytes = format!(
        "sent {} by shared memory and {} by TCP, received {} and {}",
        sum(|end| end.send.shm_bytes),
        sum(|end| end.send.tcp_bytes),
        sum(|end| end.receive.shm_bytes),
        sum(|end| end.receive.tcp_bytes),
    );
    let mut text = format!("{}\n{}\n", screen.wrap(&ends, 0, 2), screen.wrap(&bytes, 0, 2));
    if open.on_tcp + open.mixed > 0 {
        let advice = "`shunt explain` with a program's name or pid says what to do about a reason.";
        let _ = writeln!(text, "{}", screen.wrap(advice, 0, 2));
    }
    text
}

fn count_of(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Returns a name with all characters made printable. A program chooses its own name.
pub(crate) fn printable(name: &str) -> String {
    visible(name).into_owned()
}

#[cfg(test)]
mod tests {
    use shunt_abi::latency::Histogram;
    use shunt_abi::status::Totals;

    use super::*;

    fn direction(transport: Transport, reason: Reason, tcp_bytes: u64, shm_bytes: u64) -> Direction {
        Direction { transport, reason, tcp_bytes, shm_bytes }
    }

    fn totals(share: Share) -> Totals {
        Totals { share, ..Totals::default() }
    }

    fn snapshot(connections: Vec<Connection>) -> Snapshot {
        let process = Process {
            pid: 42,
            uid: 0,
            program: "memca\x07".into(),
            totals: totals(Share { seen: 12, offered: 3, on_shm: 2 }),
            connections,
            left_out: 0,
            ended_connections: Vec::new(),
            ended_seconds_ago: None,
        };
        Snapshot {
            broker_pid: 7,
            uptime_seconds: 61,
            of_all: true,
            links: 1,
            totals: totals(Share { seen: 20, offered: 4, on_shm: 3 }),
            processes: vec![process],
            ..Snapshot::default()
        }
    }

    fn connection() -> Connection {
        Connection {
            cookie: 1,
            fd: 5,
            local: "127.0.0.1:11211".parse().unwrap(),
            remote: "[::1]:40000".parse().unwrap(),
            send: direction(Transport::Shm, Reason::None, 100, 2048),
            receive: direction(Transport::Tcp, Reason::SocketOption, 5, 1024),
            option: Some("TCP_INQ".into()),
            connected: false,
            latency: Latency::default(),
            ended_seconds_ago: None,
        }
    }

    fn text(snapshot: &Snapshot) -> String {
        render(snapshot, &Filter::default(), false, &Screen::default())
    }

    #[test]
    fn a_connection_is_one_line_with_its_reasons_explained() {
        assert_eq!(
            text(&snapshot(vec![connection()])),
            "broker 7, up 1 min 1 s: 1 pair of programs with shared memory, 0 connections put on it\n\
             connection ends so far: 20 used, 4 of them offered to the broker, 3 on shared memory for a time\n\
             \n\
             PROGRAM     PID  LOCAL            REMOTE       SENDS  SENT SHM  SENT TCP  RECEIVES  RECV SHM  RECV TCP  WHY TCP\n\
             memca\\u{7}   42  127.0.0.1:11211  [::1]:40000  shm    2.00 KiB     100 B  tcp       1.00 KiB       5 B  receives: socket_option (TCP_INQ)\n\
             \n\
             PROGRAM     PID  OPEN: SHM  MIXED  TCP  EVER: USED  OFFERED  ON SHM  SHORT\n\
             memca\\u{7}   42          0      1    0          12        3       2      0\n\
             \n\
             socket_option: An option was set that shared memory does not emulate. (1 connection end)\n\
             1 open connection end of 1 program: 0 on shared memory (shm), 1 with one direction on each, 0 on TCP\n\
             sent 2.00 KiB by shared memory and 100 B by TCP, received 1.00 KiB and 5 B\n\
             `shunt explain` with a program's name or pid says what to do about a reason.\n"
        );
    }

    #[test]
    fn links_of_an_earlier_broker_are_unknown_and_not_none() {
        let after = Snapshot { links: 0, earlier_ends: 2, ..snapshot(vec![connection()]) };
        let expected = "broker 7, up 1 min 1 s: 0 pairs of programs with shared memory since it was restarted \
                        (earlier pairs are unknown: they have 2 connection ends), 0 connections put on it\n";
        let text = text(&after);
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn what_has_ended_is_shown_with_its_age() {
        let mut snapshot = snapshot(vec![connection()]);
        let ended = Connection { ended_seconds_ago: Some(5), ..connection() };
        snapshot.processes[0].ended_connections = vec![ended];
        let mut curl = Process {
            pid: 9,
            program: "curl".into(),
            ended_seconds_ago: Some(3),
            ..snapshot.processes[0].clone()
        };
        curl.totals = totals(Share { seen: 1, offered: 0, on_shm: 0 });
        curl.totals.counters.insert("connections_short".into(), 1);
        snapshot.ended_processes = vec![curl];
        let text = text(&snapshot);
        assert!(text.contains("Connections that ended in the last minute:\nPROGRAM "), "{text}");
        let expected = "Programs that ended in the last minute:\n\
                        PROGRAM  PID  SECONDS AGO  USED  OFFERED  ON SHM  SHORT\n\
                        curl       9            3     1        0       0      1\n";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn programs_that_have_not_registered_are_named() {
        let one = |pid| Unregistered { program: "redis-server".into(), pid };
        assert_eq!(not_yet(&[], &Screen::default()), "");
        let text = not_yet(&[one(1), one(2)], &Screen::default());
        assert!(text.starts_with("2 programs under shunt") && text.contains("redis-server (2)"), "{text}");
    }

    #[test]
    fn no_connection_is_said_and_refused_offers_are_explained() {
        let mut snapshot = snapshot(Vec::new());
        snapshot.offers_refused.insert("stale".into(), 8);
        let text = text(&snapshot);
        let expected = "offers that the broker refused since the start:\n  \
                        8 times stale: One end was closed after its offer, before it was paired.\n";
        assert!(text.contains(expected), "{text}");
        assert!(text.ends_with("\n1 program, no connection is open\n"), "{text}");
        assert!(text.contains("memca\\u{7}   42"), "a program without a connection is listed: {text}");
    }

    #[test]
    fn no_program_is_said() {
        let mut snapshot = snapshot(Vec::new());
        snapshot.processes.clear();
        assert!(text(&snapshot).ends_with("No program is under shunt at this broker now.\n"));
        let filter = Filter { program: vec!["nginx".into()], port: vec![80] };
        assert_eq!(
            render(&snapshot, &filter, false, &Screen::default()),
            "No program under shunt at this broker fits: program nginx and port 80.\n"
        );
    }

    #[test]
    fn a_summary_has_no_line_for_each_connection() {
        let snapshot = snapshot(vec![connection()]);
        let text = render(&snapshot, &Filter::default(), true, &Screen::default());
        assert!(!text.contains("LOCAL") && text.contains("socket_option: "), "{text}");
        let summary = serde_json::to_value(Summary::of(&snapshot)).unwrap();
        assert_eq!(
            summary,
            serde_json::json!({
                "on_shm": 0, "mixed": 1, "on_tcp": 0, "on_tcp_because": { "socket_option": 1 },
                "programs": [{
                    "program": "memca\u{7}", "pid": 42,
                    "on_shm": 0, "mixed": 1, "on_tcp": 0, "on_tcp_because": { "socket_option": 1 },
                }],
            })
        );
    }

    #[test]
    fn no_line_is_wider_than_the_screen() {
        let mut snapshot = snapshot(vec![connection()]);
        snapshot.offers_refused.insert("broker_limit".into(), u64::MAX);
        snapshot.processes[0].connections[0].send.shm_bytes = u64::MAX;
        for width in [60, 80, 100, 140] {
            let screen = Screen { width: Some(width), has_colours: false };
            let text = render(&snapshot, &Filter::default(), false, &screen);
            text.lines().for_each(|line| assert!(table::width(line) <= width, "{width}: {line}"));
            assert!(text.contains("127.0.0.1:11211") == (width > 60), "{width}: {text}");
        }
    }

    /// Returns a latency of so many requests that took 50 ms.
    fn latency(requests: usize) -> Latency {
        let histogram = Histogram::default();
        (0..requests).for_each(|_| histogram.add(50_000_000));
        histogram.copy()
    }

    #[test]
    fn latencies_are_those_of_the_end_that_connected_and_unknown_without_an_answer() {
        let measured = Connection { connected: true, latency: latency(3), ..connection() };
        let mut silent = Connection { connected: true, cookie: 2, ..connection() };
        silent.remote.set_port(40001);
        silent.send = silent.receive;
        let shown = latencies(&snapshot(vec![measured, silent, connection()]), &Screen::default());
        assert_eq!(
            shown,
            "Latency of requests in 2 seconds, at the end that has connected:\n\
             PROGRAM     PID  LOCAL            REMOTE       TRANSPORT  REQUESTS     MEAN  HALF WITHIN  99 % WITHIN\n\
             memca\\u{7}   42  127.0.0.1:11211  [::1]:40000  mixed             3  50.0 ms      65.5 ms      65.5 ms\n\
             memca\\u{7}   42  127.0.0.1:11211  [::1]:40001  tcp         unknown  unknown      unknown      unknown\n"
        );
        assert!(latencies(&snapshot(vec![connection()]), &Screen::default()).contains("has made itself"));
    }

    #[test]
    fn latencies_of_an_earlier_question_are_removed() {
        let end = |requests| Connection { connected: true, latency: latency(requests), ..connection() };
        let of = |requests| {
            let mut snapshot = snapshot(vec![end(requests)]);
            snapshot.processes[0].totals.latency = latency(requests);
            snapshot
        };
        let mut after = of(5);
        only_since(&of(3), &mut after);
        assert_eq!(after.processes[0].connections[0].latency, latency(2));
        assert_eq!(after.processes[0].totals.latency, latency(2));
        let mut same = of(3);
        only_since(&of(3), &mut same);
        assert!(same.processes[0].connections[0].latency.is_unknown());
    }
}
