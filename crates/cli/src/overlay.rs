//! `shunt overlay`: runs a host's router, prints its status, and runs programs under a supervisor.

mod policy;
pub(crate) mod seen;

use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use sd_notify::NotifyState;
use serde_json::Value;
use shunt_overlay::{Request, Step, SuperviseError, Supervised};
use shunt_start::program;

use crate::args::{Overlay, OverlayRunArgs};
use crate::daemon::{notify, shutdown, start_log};
use crate::exec;
use crate::table::{Column, left, render, right};

pub(crate) fn run(part: &Overlay) -> Result<ExitCode> {
    match part {
        Overlay::Router { config } => route(config)?,
        Overlay::Status { control, json } => {
            let status = shunt_overlay::ask(control, &Request::Status)?;
            print!("{}", if *json { format!("{status:#}\n") } else { report(&status) });
        }
        Overlay::Policy(part) => policy::run(part)?,
        Overlay::Supervisor { take_over: Some(record), .. } => shunt_overlay::supervise_on(*record)?,
        Overlay::Supervisor { router, process, .. } => {
            let stream = std::io::stdin().as_fd().try_clone_to_owned()?;
            shunt_overlay::supervise_apart(stream, router.as_deref(), *process)?;
        }
        Overlay::NewKey { next, use_next, retire, file } => match (next, use_next, retire) {
            (true, ..) => shunt_overlay::rotate(file, Step::Next)?,
            (_, true, _) => shunt_overlay::rotate(file, Step::UseNext)?,
            (.., true) => shunt_overlay::rotate(file, Step::Retire)?,
            _ => shunt_overlay::new_key(file)?,
        },
        Overlay::Run(args) => return Ok(supervise(args)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs CMD under a supervisor. Returns only if CMD could not be started.
fn supervise(args: &OverlayRunArgs) -> ExitCode {
    let name = args.command[0].to_string_lossy();
    let refuse = |why: &dyn std::fmt::Display, exit_code: u8| {
        say(&format!("{name}: {why}"));
        ExitCode::from(exit_code)
    };
    let path = match program::find(&args.command[0], std::env::var_os("PATH")) {
        Ok(path) => path,
        Err(error) => return refuse(&error, error.exit_code()),
    };
    match shunt_overlay::supervise(&args.router) {
        Ok(Supervised::Ready) => {}
        Ok(Supervised::Refused) => say(&format!(
            "{name} runs on the overlay: the router does not trust containers, and something in this one is not under its filter; \
             start the container's first program by shunt overlay run, and whatever else is started in it from outside"
        )),
        Ok(Supervised::WithoutRouter) => say(&format!(
            "{name} runs on the overlay until a router answers at {}: is its directory in the container?",
            args.router.display()
        )),
        Err(error @ (SuperviseError::Lost | SuperviseError::Abandoned)) => return refuse(&error, 126),
        Err(error) => say(&format!("{name} runs on the overlay: {error}")),
    }
    let Err(refused) = exec::exec(&path, &args.command, std::env::vars_os());
    refuse(&refused.message, refused.exit_code)
}

fn route(config: &Path) -> Result<()> {
    start_log(None, None)?;
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    // A blocking task may take long in each network namespace. The router does not wait for these
    // tasks when it ends.
    let runtime = runtime.enable_all().max_blocking_threads(4096).build()?;
    let ended = runtime.block_on(async {
        let shutdown = shutdown()?;
        let ready = || {
            tracing::info!("the router serves");
            notify(NotifyState::Ready);
        };
        shunt_overlay::run(config, ready, shutdown).await.map_err(anyhow::Error::from)
    });
    runtime.shutdown_background();
    ended
}

/// Prints one line on standard error. A failed write is ignored, so that the program runs anyway.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "shunt: {line}");
}

/// Returns the status as text.
fn report(status: &Value) -> String {
    let number = |value: &Value| value.as_u64().unwrap_or(0).to_string();
    let now = &status["now"];
    let mut text = format!(
        "router {}, {} supervisors in {} network namespaces, {} listening sockets\n\n",
        status["name"].as_str().unwrap_or("?"),
        number(&now["supervisors"]),
        number(&now["namespaces"]),
        number(&now["listeners"]),
    );
    let versions = now["lines"]["other-versions"].as_object();
    for (host, version) in versions.into_iter().flatten() {
        let (theirs, own) = (number(version), number(&status["protocol"]));
        text += &format!(
            "the router of {host} has version {theirs} of the protocol, and this one {own}: \
             connections with its containers stay on the overlay\n\n"
        );
    }
    let mut rows = Vec::new();
    for end in ["client", "server"] {
        let paths = &status["connections"][end];
        let row = |path: &str, reason: &str, count| vec![end.to_owned(), path.into(), reason.into(), count];
        rows.push(row("host", "", number(&paths["host"])));
        let overlay = paths["overlay"].as_object().into_iter().flatten();
        rows.extend(overlay.map(|(reason, count)| row("overlay", reason, number(count))));
        let denied = paths["denied"].as_object().into_iter().flatten();
        rows.extend(denied.map(|(reason, count)| row("none", reason, number(count))));
    }
    text += &render(&PATHS, &rows);
    text
}

const PATHS: [Column; 4] = [left("THIS END", 0), left("PATH", 0), left("REASON", 0), right("CONNECTIONS", 0)];
