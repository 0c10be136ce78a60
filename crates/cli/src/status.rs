//! `shunt status`: prints the broker's snapshot as a table or as JSON, and the connections of the
//! overlay's router, if there is one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::shown::visible;
use shunt_abi::status::{Connection, Direction, Process, Share, Snapshot};

use crate::args::StatusArgs;
use crate::broker;
use crate::overlay::seen::View;
use crate::table::{self, Column, left, right};

const COLUMNS: [Column; 11] = [
    left("PROGRAM", 0),
    right("PID", 0),
    left("LOCAL", 0),
    left("REMOTE", 0),
    left("SENDS", 0),
    right("BY SHM", 0),
    right("BY TCP", 0),
    left("RECEIVES", 0),
    right("BY SHM", 0),
    right("BY TCP", 0),
    left("WHY TCP", 0),
];

/// The columns that count connection ends since the process started.
const SHARES: [Column; 5] =
    [left("PROGRAM", 0), right("PID", 0), right("ENDS USED", 0), right("OFFERED", 0), right("ON SHM", 0)];

pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    let overlay = View::ask(&args.control.control);
    let snapshot = match find(args.broker.as_deref()) {
        Ok(broker) => Some(shunt_broker::status(broker)?),
        // A host may have an overlay's router without a broker.
        Err(_) if overlay.is_some() && args.broker.is_none() => None,
        Err(error) => return Err(error),
    };
    if args.json {
        let all = All { snapshot, overlay };
        println!("{}", serde_json::to_string_pretty(&all).context("the snapshot cannot be printed")?);
        return Ok(());
    }
    let parts = [snapshot.as_ref().map(render), overlay.as_ref().map(View::text)];
    print!("{}", parts.into_iter().flatten().collect::<Vec<_>>().join("\n"));
    Ok(())
}

/// The broker's snapshot, and the view of the overlay's router, if this host has one.
#[derive(Serialize)]
struct All {
    #[serde(flatten)]
    snapshot: Option<Snapshot>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overlay: Option<View>,
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

/// Returns the whole snapshot as text.
fn render(snapshot: &Snapshot) -> String {
    let mut text = format!(
        "broker {}, up {}: {}, {}{}\n",
        snapshot.broker_pid,
        table::duration(snapshot.uptime_seconds),
        count(snapshot.links, "link"),
        count(snapshot.pairs_made as usize, "pair") + " made",
        if snapshot.of_all { "" } else { ", of your own" },
    );
    for (what, counts) in [
        ("offers refused", &snapshot.offers_refused),
        ("pairs ended", &snapshot.pairs_ended),
        ("bad messages", &snapshot.bad_messages),
    ] {
        if !counts.is_empty() {
            let _ = writeln!(text, "{what}: {}", list(counts));
        }
    }
    let _ = writeln!(text, "connection ends since the start: {}", share(&snapshot.totals.share));
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
    let mut shares: Vec<_> =
        snapshot.processes.iter().filter(|process| process.totals.share.seen > 0).map(share_row).collect();
    shares.sort();
    let _ = writeln!(text, "{}", table::render(&SHARES, &shares));
    for reason in reasons(&connections) {
        let _ = writeln!(text, "{}: {}", reason.label(), reason.explanation());
    }
    let left_out: usize = snapshot.processes.iter().map(|process| process.left_out).sum();
    if left_out > 0 {
        let _ = writeln!(text, "{} more than fit into a status", count(left_out, "connection end"));
    }
    text + &totals(snapshot.processes.len(), &connections)
}

fn share(share: &Share) -> String {
    format!("{} used, {} offered, {} on shared memory", share.seen, share.offered, share.on_shm)
}

fn share_row(process: &Process) -> Vec<String> {
    let Share { seen, offered, on_shm } = process.totals.share;
    let numbers = [u64::from(process.pid), seen, offered, on_shm].map(|number| number.to_string());
    [printable(&process.program)].into_iter().chain(numbers).collect()
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

fn totals(programs: usize, connections: &[&Connection]) -> String {
    let on = |transport| {
        connections
            .iter()
            .filter(|end| end.send.transport == transport && end.receive.transport == transport)
            .count()
    };
    let (shm, tcp) = (on(Transport::Shm), on(Transport::Tcp));
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

/// Returns a name with all characters made printable. A program chooses its own name.
pub(crate) fn printable(name: &str) -> String {
    visible(name).into_owned()
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_connection_is_one_line_with_its_reasons_explained() {
        let connection = Connection {
            cookie: 1,
            fd: 5,
            local: "127.0.0.1:11211".parse().unwrap(),
            remote: "[::1]:40000".parse().unwrap(),
            send: direction(Transport::Shm, Reason::None, 100, 2048),
            receive: direction(Transport::Tcp, Reason::SocketOption, 5, 1024),
            option: Some("TCP_INQ".into()),
        };
        assert_eq!(
            render(&snapshot(vec![connection])),
            "broker 7, up 1 min 1 s: 1 link, 0 pairs made\n\
             connection ends since the start: 20 used, 4 offered, 3 on shared memory\n\
             \n\
             PROGRAM     PID  LOCAL            REMOTE       SENDS    BY SHM  BY TCP  RECEIVES    BY SHM  BY TCP  WHY TCP\n\
             memca\\u{7}   42  127.0.0.1:11211  [::1]:40000  shm    2.00 KiB   100 B  tcp       1.00 KiB     5 B  receives: socket_option (TCP_INQ)\n\
             \n\
             PROGRAM     PID  ENDS USED  OFFERED  ON SHM\n\
             memca\\u{7}   42         12        3       2\n\
             \n\
             socket_option: An option was set that shared memory does not emulate.\n\
             1 connection end of 1 program: 0 on shared memory, 1 half, 0 on TCP\n\
             sent 2.00 KiB by shared memory and 100 B by TCP, received 1.00 KiB and 5 B\n"
        );
    }

    #[test]
    fn no_connection_is_said() {
        let mut snapshot = snapshot(Vec::new());
        snapshot.offers_refused.insert("stale".into(), 2);
        let text = render(&snapshot);
        assert!(text.ends_with(
                "offers refused: stale 2\nconnection ends since the start: 20 used, 4 offered, 3 on shared memory\n\
                 1 program, no connection\n"
            ), "{text}");
    }
}
