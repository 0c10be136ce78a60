//! `shunt service status`: whether services are enabled, and what their processes do.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use shunt_abi::reason::Reason;
use shunt_abi::shown::visible;

use super::{Named, enabled, path, restart_needed, unit};
use crate::args::ServicePlace;
use crate::explain::Summary;

/// The state of one unit, or of all instances of a template.
#[derive(Debug, Serialize)]
struct Status {
    unit: String,
    enabled: bool,
    drop_in: PathBuf,
    /// The active units.
    active: Vec<String>,
    /// The units whose processes are not as the drop-in says.
    restart: Vec<String>,
    processes: Vec<Summary>,
    connections: Connections,
}

/// Connection ends of all processes, by the transports of their two directions.
#[derive(Debug, Default, Serialize, PartialEq, Eq)]
struct Connections {
    shared_memory: usize,
    tcp: usize,
    /// One direction is on shared memory, the other on TCP.
    mixed: usize,
    /// Why the others are on TCP.
    reasons: BTreeMap<String, usize>,
}

pub(super) fn run(name: Option<&str>, json: bool, place: &ServicePlace) -> Result<()> {
    let names = name.map_or_else(|| enabled(place), |name| vec![name.to_owned()]);
    let mut all = Vec::new();
    for one in &names {
        let status = status(one, place)?;
        all.push(status);
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&all).context("the report cannot be printed")?);
    } else if all.is_empty() {
        println!("no service is enabled: `shunt service enable NAME`");
    } else {
        print!("{}", all.iter().map(text).collect::<String>());
    }
    Ok(())
}

fn status(name: &str, place: &ServicePlace) -> Result<Status> {
    let mut named = Named::look(name)?;
    if let Some(template) = named.grouped() {
        named = Named::look(&template)?;
    }
    let path = path(place, &named.name);
    let enabled = fs::exists(&path)?;
    let is_known = named.units.iter().any(|unit| unit.get("LoadState") != Some("not-found"));
    ensure!(enabled || is_known, "there is no unit {}", named.name);
    let groups = named.units.iter().filter_map(|unit| unit.get("ControlGroup"));
    let mut pids: Vec<u32> = groups.flat_map(unit::processes).collect();
    pids.dedup();
    let processes = crate::explain::processes(&pids);
    Ok(Status {
        enabled,
        drop_in: path,
        active: named.active().map(str::to_owned).collect(),
        restart: restart_needed(&named, enabled),
        connections: connections(&processes),
        processes,
        unit: named.name,
    })
}

fn connections(processes: &[Summary]) -> Connections {
    let mut sum = Connections::default();
    for process in processes {
        sum.shared_memory += process.shared_memory;
        sum.tcp += process.tcp;
        sum.mixed += process.mixed;
        for (reason, count) in &process.reasons {
            *sum.reasons.entry(reason.clone()).or_default() += count;
        }
    }
    sum
}

fn text(status: &Status) -> String {
    let enabled = if status.enabled { "enabled" } else { "not enabled" };
    let active = if status.active.is_empty() { "not running" } else { "running" };
    let under = status.processes.iter().filter(|process| process.under_shunt).count();
    let mut text = format!("{}: {enabled}, {active}\n", status.unit);
    if status.enabled {
        text += &format!("  drop-in      {}\n", status.drop_in.display());
    }
    if !status.processes.is_empty() {
        text += &format!("  processes    {under} of {} under shunt\n", status.processes.len());
        let Connections { shared_memory, tcp, mixed, reasons } = &status.connections;
        text += &format!("  connections  {shared_memory} on shared memory, {tcp} on TCP");
        text +=
            &if *mixed == 0 { "\n".to_owned() } else { format!(", {mixed} with one direction on each\n") };
        for (reason, count) in reasons {
            let why = Reason::ALL.iter().find(|one| one.label() == reason);
            let why = why.map_or(String::new(), |why| format!(": {}", why.explanation()));
            text += &format!("               {count} for {reason}{why}\n");
        }
    }
    let is_lone = |process: &&Summary| status.enabled && !process.under_shunt || !process.causes.is_empty();
    let restart = !status.restart.is_empty();
    for process in status.processes.iter().filter(is_lone).filter(|_| !restart).take(5) {
        for cause in &process.causes {
            text += &format!(
                "  {} (pid {}): {}\n",
                visible(&process.program),
                process.pid,
                visible(&cause.explanation)
            );
        }
    }
    if restart {
        let units = status.restart.join(" ");
        text += &match status.enabled {
            true if under == status.processes.len() => {
                format!("  Its libshunt.so was replaced since it started: systemctl restart {units}\n")
            }
            true => format!("  It runs as it was before: systemctl restart {units}\n"),
            false => format!("  It is under shunt until it starts again: systemctl restart {units}\n"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, under_shunt: bool, shared_memory: usize, tcp: usize) -> Summary {
        let reasons = if tcp > 0 { [("policy".to_owned(), tcp)].into() } else { BTreeMap::new() };
        Summary {
            pid,
            program: "db".into(),
            under_shunt,
            is_replaced: false,
            shared_memory,
            tcp,
            mixed: 0,
            reasons,
            causes: Vec::new(),
        }
    }

    fn of(enabled: bool, restart: &[&str], processes: Vec<Summary>) -> String {
        text(&Status {
            unit: "db.service".into(),
            enabled,
            drop_in: "/e/db.service.d/50-shunt.conf".into(),
            active: vec!["db.service".into()],
            restart: restart.iter().map(|&name| name.to_owned()).collect(),
            connections: connections(&processes),
            processes,
        })
    }

    #[test]
    fn status_counts_ends_by_transport() {
        assert_eq!(
            of(true, &[], vec![process(1, true, 3, 0), process(2, true, 1, 2)]),
            format!(
                "db.service: enabled, running\n\
                 \x20 drop-in      /e/db.service.d/50-shunt.conf\n\
                 \x20 processes    2 of 2 under shunt\n\
                 \x20 connections  4 on shared memory, 2 on TCP\n\
                 \x20              2 for policy: {}\n",
                Reason::Policy.explanation()
            )
        );
    }

    #[test]
    fn status_names_the_restart_that_is_missing() {
        let text = of(true, &["db.service"], vec![process(1, false, 0, 0)]);
        assert!(text.ends_with("  It runs as it was before: systemctl restart db.service\n"), "{text}");
        let text = of(false, &["db.service"], vec![process(1, true, 0, 0)]);
        assert!(
            text.starts_with("db.service: not enabled, running\n  processes    1 of 1 under shunt\n"),
            "{text}"
        );
        assert!(
            text.ends_with("under shunt until it starts again: systemctl restart db.service\n"),
            "{text}"
        );
    }
}
