//! Runs the HTTP proxy, and shows the status of a running one.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sd_notify::NotifyState;
use serde_json::Value;
use shunt_serve::engine::Address;
use shunt_serve_http::engine::{self, Options};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{ServeArgs, ServeEngine};
use crate::daemon::{notify, shutdown, start_log};
use crate::table::{Column, left, render, right};

/// The name of the service.
pub(super) const NAME: &str = "builtin:http-proxy";

pub(super) fn serve(args: &ServeArgs) -> Result<()> {
    ensure!(args.engine != ServeEngine::Kernel, "{NAME} runs in user space: leave out --engine kernel");
    ensure!(
        args.hash.is_none(),
        "{NAME} does not forward by a key: leave out --hash, and see docs/http-proxy.md"
    );
    let file = args.backends.as_deref().context("say --backends FILE (docs/http-proxy.md describes it)")?;
    let [Address::Tcp(listen)] = args.listen[..] else {
        bail!("{NAME} has one listener: say --listen ADDRESS:PORT");
    };
    let options = Options {
        listen,
        file: std::path::absolute(file)?,
        threads: args.threads as usize,
        control: args.control.control.clone(),
        metrics: args.metrics,
        drain: Duration::from_secs(args.drain),
    };
    start_log(None, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let shutdown = shutdown()?;
        let reload = signal(SignalKind::hangup())?;
        let ready = || {
            tracing::info!("the service serves");
            notify(NotifyState::Ready);
        };
        engine::run(options, ready, reload, shutdown).await.map_err(anyhow::Error::from)
    })
}

/// Returns true if a status is that of a proxy.
pub(super) fn is_proxy(status: &Value) -> bool {
    status["service"] == engine::SERVICE
}

/// Returns the status as text.
pub(super) fn report(status: &Value) -> String {
    let of = |value: &Value, name: &str| value[name].as_u64().unwrap_or(0).to_string();
    let word = |value: &Value, name: &str| value[name].as_str().unwrap_or("?").to_owned();
    let mut text = format!(
        "{} at {}: {} clients, {} requests, {} retries, {} upgrades\n",
        word(status, "service"),
        word(status, "listen"),
        of(status, "open-connections"),
        of(status, "requests"),
        of(status, "retries"),
        of(status, "upgrades"),
    );
    let names = ["1xx", "2xx", "3xx", "4xx", "5xx"];
    let classes = names.map(|name| format!("{name} {}", of(&status["responses"], name)));
    text += &format!("replies: {}\n", classes.join(", "));
    let cached =
        ["hits", "validated", "misses", "collapsed", "stored", "refused", "entries", "bytes", "evictions"];
    let cached = cached.map(|name| (name, of(status, &format!("cache-{name}"))));
    if cached.iter().any(|(_, count)| count != "0") {
        let cached = cached.map(|(name, count)| format!("{name} {count}"));
        text += &format!("cache: {}\n", cached.join(", "));
    }
    let backends = status["backends"].as_array().into_iter().flatten();
    let backends: Vec<Vec<String>> = backends
        .map(|backend| {
            let state = if backend["up"] == true { "up" } else { "down" };
            let numbers = ["requests", "open-connections", "unused-connections", "failures"]
                .map(|name| of(backend, name));
            let names = [word(backend, "pool"), word(backend, "address"), state.to_owned()];
            names.into_iter().chain(numbers).collect()
        })
        .collect();
    text += &format!("\n{}", render(&BACKENDS, &backends));
    for (title, name) in [("REFUSED", "refused"), ("ANSWERED BY THE PROXY", "failed")] {
        let rows = status[name].as_object().into_iter().flatten();
        let rows: Vec<Vec<String>> =
            rows.map(|(reason, count)| vec![reason.clone(), count.to_string()]).collect();
        if !rows.is_empty() {
            text += &format!("\n{}", render(&[left(title, 0), right("COUNT", 0)], &rows));
        }
    }
    text
}

const BACKENDS: [Column; 7] = [
    left("POOL", 0),
    left("BACKEND", 0),
    left("STATE", 0),
    right("REQUESTS", 0),
    right("CONNECTIONS", 0),
    right("UNUSED", 0),
    right("FAILURES", 0),
];
