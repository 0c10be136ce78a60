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
use shunt_abi::shown::visible;
use shunt_overlay::{Here, Request, Step, SuperviseError, Supervised};
use shunt_start::program;

use crate::args::{Overlay, OverlayRunArgs};
use crate::daemon::{notify, shutdown, start_log};
use crate::exec;
use crate::table::{Column, left, render, right};

pub(crate) fn run(part: &Overlay) -> Result<ExitCode> {
    match part {
        Overlay::Router { config, name, address } => {
            route(config, Here { name: name.clone(), address: *address })?;
        }
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

fn route(config: &Path, here: Here) -> Result<()> {
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
        shunt_overlay::run(config, here, ready, shutdown).await.map_err(anyhow::Error::from)
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
    let lines = now["lines"]["versions"].as_object().into_iter().flatten();
    for (router, version) in lines.filter(|(_, version)| version.as_u64() < status["protocol"].as_u64()) {
        text += &format!(
            "the router at {router} has an older version of the protocol, {}: update it too\n\n",
            number(version)
        );
    }
    text += &etcd(&now["etcd"]);
    text += &kubernetes(&now["kubernetes"]);
    text += &in_band(&now["in-band"]);
    if let Some(error) = now["services"]["error"].as_str() {
        text += &format!("services: it is unknown where they lead: {}\n\n", visible(error));
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

/// Returns the state of etcd as text. Empty if it is not configured.
fn etcd(found: &Value) -> String {
    if !found.is_object() {
        return String::new();
    }
    let entries = found["entries"].as_u64().unwrap_or(0);
    if found["error"].is_string() {
        format!("etcd, {entries} entries known: {}\n\n", advised(found))
    } else if found["watching"] == true && found["published"] == true {
        format!("etcd: connected, {entries} entries\n\n")
    } else {
        "etcd: not connected yet\n\n".to_owned()
    }
}

/// Returns a text of the router without characters that would change the terminal.
fn said(text: &Value) -> String {
    visible(text.as_str().unwrap_or_default()).to_string()
}

/// Returns the error of a source, with the advice if there is some.
fn advised(failure: &Value) -> String {
    match failure["advice"].as_str() {
        Some(advice) => format!("{}: {advice}", said(&failure["error"])),
        None => said(&failure["error"]),
    }
}

/// Returns the state of the Kubernetes API as text. Empty if it is no source.
fn kubernetes(source: &Value) -> String {
    let Some(resources) = source["resources"].as_object() else { return String::new() };
    let server = source["server"].as_str().unwrap_or("this pod's cluster");
    let mut text = format!("the Kubernetes API of {}, node {}\n", visible(server), said(&source["node"]));
    let row = |(name, feed): (&String, &Value)| {
        let connected = if feed["connected"] == true { said(&feed["state"]) } else { "not connected".into() };
        let age =
            feed["seconds-since-answer"].as_u64().map_or("never".to_owned(), |age| format!("{age} s ago"));
        let objects = feed["objects"].as_u64().unwrap_or(0).to_string();
        vec![name.clone(), connected, objects, age, said(&feed["version"])]
    };
    text += &render(&RESOURCES, &resources.iter().map(row).collect::<Vec<_>>());
    for (name, feed) in resources.iter().filter(|(_, feed)| feed["error"].is_string()) {
        text += &format!("{name}: {}\n", advised(feed));
    }
    if source["node-lists"]["error"].is_string() {
        text += &format!("pods of this node: {}\n", advised(&source["node-lists"]));
    }
    for refused in source["network-policies"]["reasons"].as_array().into_iter().flatten() {
        text += &format!(
            "NetworkPolicy {} is not enforced: {}\n",
            said(&refused["policy"]),
            said(&refused["reason"])
        );
    }
    text + "\n"
}

/// Returns the state of in-band discovery as text. Empty if it is not configured.
fn in_band(found: &Value) -> String {
    let Some(containers) = found["containers"].as_object() else { return String::new() };
    if let Some(error) = found["error"].as_str() {
        return format!("in-band discovery does not work: {}\n\n", visible(error));
    }
    let of = |name: &str| containers.get(name).and_then(Value::as_u64).unwrap_or(0);
    let routers = found["routers"].as_array().map_or(0, Vec::len);
    format!(
        "in-band discovery: {} containers known at {routers} other routers, {} asked about, {} refused, {} without a hint\n\n",
        of("known"),
        of("asking"),
        of("refused"),
        of("awaited"),
    )
}

const RESOURCES: [Column; 5] =
    [left("RESOURCE", 0), left("STATE", 0), right("OBJECTS", 0), left("LAST ANSWER", 0), left("VERSION", 0)];

const PATHS: [Column; 4] = [left("THIS END", 0), left("PATH", 0), left("REASON", 0), right("CONNECTIONS", 0)];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn etcd_is_shown_with_what_to_do() {
        let mut found = json!({ "watching": false, "published": false, "entries": 0, "error": null });
        assert_eq!(etcd(&found), "etcd: not connected yet\n\n");
        found = json!({ "watching": true, "published": true, "entries": 3, "error": null });
        assert_eq!(etcd(&found), "etcd: connected, 3 entries\n\n");
        found["error"] = json!("it does not answer");
        found["advice"] = json!("check it");
        assert_eq!(etcd(&found), "etcd, 3 entries known: it does not answer: check it\n\n");
        assert_eq!(etcd(&Value::Null), "");
    }

    #[test]
    fn in_band_discovery_is_shown() {
        let containers = json!({ "known": 3, "asking": 1, "refused": 0, "awaited": 2 });
        let mut found = json!({ "error": null, "containers": containers, "routers": ["192.168.0.2:7450"] });
        assert_eq!(
            in_band(&found),
            "in-band discovery: 3 containers known at 1 other routers, 1 asked about, 0 refused, 2 without a hint\n\n"
        );
        found["error"] = json!("the kernel does not take the program");
        assert!(in_band(&found).contains("does not work: the kernel does not take"));
        assert_eq!(in_band(&Value::Null), "");
    }

    #[test]
    fn the_kubernetes_api_is_shown_with_what_to_do() {
        let feed = |connected: bool, error: Value| {
            json!({
                "state": "watching", "connected": connected, "objects": 12, "version": "345",
                "seconds-since-answer": if connected { json!(3) } else { Value::Null },
                "error": error, "advice": error.as_str().map(|_| "renew it"),
            })
        };
        let mut source = json!({
            "server": "https://192.168.0.10:6443", "node": "one",
            "resources": { "namespaces": feed(false, json!("it answers 401")), "pods": feed(true, Value::Null) },
            "node-lists": { "error": null },
            "network-policies": { "reasons": [{ "policy": "shop/db", "reason": "there is no key x" }] },
        });
        assert_eq!(
            kubernetes(&source),
            "the Kubernetes API of https://192.168.0.10:6443, node one\n\
             RESOURCE    STATE          OBJECTS  LAST ANSWER  VERSION\n\
             namespaces  not connected       12  never        345\n\
             pods        watching            12  3 s ago      345\n\
             namespaces: it answers 401: renew it\n\
             NetworkPolicy shop/db is not enforced: there is no key x\n\n"
        );
        source["resources"] = Value::Null;
        assert_eq!(kubernetes(&source), "");
    }
}
