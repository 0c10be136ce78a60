//! `shunt status`: the broker's snapshot as a table, or as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use shunt_abi::reason::{Reason, Road};
use shunt_abi::status::{Connection, Direction, Snapshot};

use crate::args::StatusArgs;
use crate::broker;
use crate::table::{self, Column};

const COLUMNS: [Column; 11] = {
    const fn left(title: &'static str) -> Column {
        Column { title, right: false }
    }
    const fn right(title: &'static str) -> Column {
        Column { title, right: true }
    }
    [
        left("PROGRAM"),
        right("PID"),
        left("LOCAL"),
        left("REMOTE"),
        left("SENDS"),
        right("BY SHM"),
        right("BY TCP"),
        left("RECEIVES"),
        right("BY SHM"),
        right("BY TCP"),
        left("WHY TCP"),
    ]
};

pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    let snapshot = shunt_broker::status(find(args.broker.as_deref())?)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&snapshot).context("the snapshot cannot be printed")?);
    } else {
        print!("{}", render(&snapshot));
    }
    Ok(())
}

fn find(asked: Option<&Path>) -> Result<PathBuf> {
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

/// Everything a person wants to know at one look.
fn render(snapshot: &Snapshot) -> String {
    let mut text = format!(
        "broker {}, up {}: {}, {}\n",
        snapshot.broker_pid,
        table::duration(snapshot.uptime_seconds),
        count(snapshot.links, "link"),
        count(snapshot.pairs_made as usize, "pair") + " made",
    );
    for (what, counts) in
        [("offers refused", &snapshot.offers_refused), ("bad messages", &snapshot.bad_messages)]
    {
        if !counts.is_empty() {
            let _ = writeln!(text, "{what}: {}", list(counts));
        }
    }
    let connections: Vec<&Connection> =
        snapshot.processes.iter().flat_map(|process| &process.connections).collect();
    if connections.is_empty() {
        let _ = writeln!(text, "{}, no connection", count(snapshot.processes.len(), "program"));
        return text;
    }
    let mut rows = Vec::new();
    for process in &snapshot.processes {
        for connection in &process.connections {
            rows.push(row(&printable(&process.program), process.pid, connection));
        }
    }
    rows.sort();
    let _ = write!(text, "\n{}\n", table::render(&COLUMNS, &rows));
    for reason in reasons(&connections) {
        let _ = writeln!(text, "{}: {}", reason.label(), reason.explanation());
    }
    text + &totals(snapshot.processes.len(), &connections)
}

fn row(program: &str, pid: u32, connection: &Connection) -> Vec<String> {
    let Connection { send, receive, .. } = connection;
    vec![
        program.to_owned(),
        pid.to_string(),
        connection.local.to_string(),
        connection.remote.to_string(),
        send.road.label().to_owned(),
        table::bytes(send.shm_bytes),
        table::bytes(send.tcp_bytes),
        receive.road.label().to_owned(),
        table::bytes(receive.shm_bytes),
        table::bytes(receive.tcp_bytes),
        why(send, receive),
    ]
}

/// The reason, or both where the two directions differ.
fn why(send: &Direction, receive: &Direction) -> String {
    match (reason(send), reason(receive)) {
        (None, None) => String::new(),
        (Some(one), Some(other)) if one == other => one.label().to_owned(),
        (Some(one), Some(other)) => format!("{} / {}", one.label(), other.label()),
        (Some(one), None) => format!("sends: {}", one.label()),
        (None, Some(one)) => format!("receives: {}", one.label()),
    }
}

fn reason(direction: &Direction) -> Option<Reason> {
    (direction.road == Road::Tcp).then_some(direction.reason)
}

fn reasons(connections: &[&Connection]) -> Vec<Reason> {
    let directions = connections.iter().flat_map(|connection| [&connection.send, &connection.receive]);
    let codes: BTreeSet<u16> = directions.filter_map(reason).map(|reason| reason as u16).collect();
    // `none` on TCP is a connection that is about to switch: nothing to explain.
    codes.into_iter().filter_map(Reason::parse).filter(|reason| *reason != Reason::None).collect()
}

fn totals(programs: usize, connections: &[&Connection]) -> String {
    let on =
        |road| connections.iter().filter(|end| end.send.road == road && end.receive.road == road).count();
    let (shm, tcp) = (on(Road::Shm), on(Road::Tcp));
    let sum = |pick: fn(&Connection) -> u64| {
        table::bytes(connections.iter().fold(0_u64, |sum, end| sum.saturating_add(pick(end))))
    };
    format!(
        "{} of {}: {shm} on shared memory, {} half, {tcp} on TCP\n\
         sent {} by shared memory and {} by TCP, received {} and {}\n",
        count(connections.len(), "connection end"),
        count(programs, "program"),
        connections.len() - shm - tcp,
        sum(|end| end.send.shm_bytes),
        sum(|end| end.send.tcp_bytes),
        sum(|end| end.receive.shm_bytes),
        sum(|end| end.receive.tcp_bytes),
    )
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

fn list(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

/// A program names itself: what it says must not move the terminal's cursor.
fn printable(name: &str) -> String {
    name.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_abi::status::Process;

    fn direction(road: Road, reason: Reason, tcp_bytes: u64, shm_bytes: u64) -> Direction {
        Direction { road, reason, tcp_bytes, shm_bytes }
    }

    fn snapshot(connections: Vec<Connection>) -> Snapshot {
        let process = Process {
            pid: 42,
            uid: 0,
            program: "memcached\x1b".into(),
            connections,
            counters: BTreeMap::new(),
            bypasses: BTreeMap::new(),
        };
        Snapshot {
            broker_pid: 7,
            uptime_seconds: 61,
            links: 1,
            processes: vec![process],
            ..Snapshot::default()
        }
    }

    #[test]
    fn a_connection_is_one_line_with_its_reasons_explained() {
        let connection = Connection {
            cookie: 1,
            fd: 5,
            local: "127.0.0.1:11211".parse().unwrap(),
            remote: "[::1]:40000".parse().unwrap(),
            send: direction(Road::Shm, Reason::None, 100, 2048),
            receive: direction(Road::Tcp, Reason::Fork, 5, 1024),
        };
        assert_eq!(
            render(&snapshot(vec![connection])),
            "broker 7, up 1 min 1 s: 1 link, 0 pairs made\n\
             \n\
             PROGRAM     PID  LOCAL            REMOTE       SENDS    BY SHM  BY TCP  RECEIVES    BY SHM  BY TCP  WHY TCP\n\
             memcached?   42  127.0.0.1:11211  [::1]:40000  shm    2.00 KiB   100 B  tcp       1.00 KiB     5 B  receives: fork\n\
             \n\
             fork: The process forked while it held the connection.\n\
             1 connection end of 1 program: 0 on shared memory, 1 half, 0 on TCP\n\
             sent 2.00 KiB by shared memory and 100 B by TCP, received 1.00 KiB and 5 B\n"
        );
    }

    #[test]
    fn no_connection_is_said() {
        let mut snapshot = snapshot(Vec::new());
        snapshot.offers_refused.insert("stale".into(), 2);
        let text = render(&snapshot);
        assert!(text.ends_with("offers refused: stale 2\n1 program, no connection\n"), "{text}");
    }
}
