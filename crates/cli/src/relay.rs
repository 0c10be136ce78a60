//! `shunt relay`: runs a relay, and sends requests to a running one.

use std::path::Path;

use anyhow::{Result, anyhow};
use sd_notify::NotifyState;
use serde_json::Value;
use shunt_relay::Request;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{RelayAction, RelayArgs};
use crate::daemon::{notify, shutdown, start_log};
use crate::table::{Column, left, render, right};

pub(crate) fn run(args: &RelayArgs) -> Result<()> {
    match (&args.action, &args.config) {
        (Some(action), _) => act(action),
        (None, Some(config)) => serve(config),
        (None, None) => Err(anyhow!("say --config FILE")),
    }
}

fn act(action: &RelayAction) -> Result<()> {
    let ask = |socket: &Path, request: Request| shunt_relay::ask(socket, &request).map(drop);
    match action {
        RelayAction::Status { control, json } => {
            let status = shunt_relay::ask(&control.control, &Request::Status)?;
            print!("{}", if *json { format!("{status:#}\n") } else { report(&status) });
        }
        RelayAction::Set { control, assignments } => {
            for assignment in assignments {
                ask(&control.control, Request::Set(assignment.clone()))?;
            }
        }
        RelayAction::Reload { control } => ask(&control.control, Request::Reload)?,
        RelayAction::Drain { control, timeout } => ask(&control.control, Request::Drain(*timeout))?,
        RelayAction::Check { config } => shunt_relay::check(config)?,
        RelayAction::NewKey { file } => shunt_relay::new_key(file)?,
    }
    Ok(())
}

fn serve(config: &Path) -> Result<()> {
    start_log(None, None)?;
    let config = std::path::absolute(config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let shutdown = shutdown()?;
        let reload = signal(SignalKind::hangup())?;
        let ready = || {
            tracing::info!("the relay serves");
            notify(NotifyState::Ready);
        };
        shunt_relay::run(config, ready, reload, shutdown).await.map_err(anyhow::Error::from)
    })
}

/// Returns the status as text.
fn report(status: &Value) -> String {
    let of = |value: &Value, name: &str| value[name].as_u64().unwrap_or(0).to_string();
    let mut text = format!(
        "relay {}, {} connections, {} waiting for a target{}\n",
        status["name"].as_str().unwrap_or("?"),
        of(status, "open-connections"),
        of(status, "idle-legs"),
        if status["draining"] == true { ", draining" } else { "" }
    );
    let peers: Vec<Vec<String>> = status["peers"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|peer| {
            let words = ["name", "address"].map(|name| peer[name].as_str().unwrap_or("?").to_owned());
            let numbers =
                ["ready", "wanted", "hits", "misses", "stale", "failed"].map(|name| of(&peer["pool"], name));
            words.into_iter().chain(numbers).collect()
        })
        .collect();
    if !peers.is_empty() {
        text += &format!("\n{}", render(&PEERS, &peers));
    }
    let counters = status["counters"].as_object().into_iter().flatten();
    let counts: Vec<Vec<String>> = counters
        .filter(|(name, _)| name.contains("_total"))
        .map(|(name, value)| vec![name.trim_start_matches("shunt_relay_").to_owned(), value.to_string()])
        .collect();
    if !counts.is_empty() {
        text += &format!("\n{}", render(&COUNTS, &counts));
    }
    text
}

const PEERS: [Column; 8] = [
    left("PEER", 0),
    left("ADDRESS", 0),
    right("READY", 0),
    right("WANTED", 0),
    right("TAKEN", 0),
    right("MISSED", 0),
    right("STALE", 0),
    right("FAILED", 0),
];
const COUNTS: [Column; 2] = [left("COUNTER", 0), right("COUNT", 0)];
