//! `shunt runtime`: makes shunt's OCI runtime known to Docker, so that `docker run --runtime=shunt`
//! starts containers under shunt. The runtime itself is in `stand_in`.

pub(crate) mod stand_in;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use shunt_oci::Change;

use crate::args::{DaemonJson, Runtime};
use crate::{broker, library};

/// Docker's configuration.
pub(crate) const DAEMON_JSON: &str = "/etc/docker/daemon.json";

pub(crate) fn run(part: &Runtime) -> Result<()> {
    match part {
        Runtime::Register(DaemonJson { file }) => {
            let change = shunt_oci::register(file, &installed()?)?;
            println!("{}: docker run --runtime={}", said(change, "registered", file), shunt_oci::NAME);
            if change == Change::Made {
                println!(
                    "Docker knows it after: systemctl reload docker, or kill -HUP and dockerd's process id"
                );
            }
        }
        Runtime::Unregister(DaemonJson { file }) => {
            let is_ours = |path: &Path| path.file_name().is_some_and(|name| name == stand_in::NAME);
            let change = shunt_oci::unregister(file, is_ours)?;
            println!("{}", said(change, "unregistered", file));
            if change == Change::Made {
                println!("Docker knows it until it is started again");
            }
        }
        Runtime::Status { daemon_json, json } => {
            let checks = checks(&daemon_json.file);
            print!("{}", if *json { format!("{:#}\n", as_json(&checks)) } else { report(&checks) });
        }
    }
    Ok(())
}

/// Returns the path of the runtime for Docker: the link next to this program, which `make install`
/// creates.
fn installed() -> Result<PathBuf> {
    let program = std::env::current_exe().context("this program's own path cannot be read")?;
    let link = program.with_file_name(stand_in::NAME);
    if link.canonicalize().ok() != program.canonicalize().ok() {
        let (program, link) = (program.display(), link.display());
        bail!("{link} is not there: `make install` makes it, or `ln -s {program} {link}`");
    }
    Ok(link)
}

fn said(change: Change, what: &str, file: &Path) -> String {
    let already = if change == Change::None { "already " } else { "" };
    format!("{already}{what} in {}", file.display())
}

/// The name of a check, and its result: a description, or an error.
type Check = (&'static str, Result<String, String>);

fn checks(file: &Path) -> [Check; 4] {
    let registered = match shunt_oci::find(file) {
        Ok(Some(path)) => Ok(path.display().to_string()),
        Ok(None) => Err(format!("not in {}: `shunt runtime register`", file.display())),
        Err(error) => Err(error.to_string()),
    };
    let socket = Path::new(shunt_broker::SYSTEM_SOCKET);
    let broker = broker::probe(socket).map(|pid| match pid {
        // systemd has made the socket, and starts the broker at the first connection.
        1 => format!("systemd starts it on demand at {}", socket.display()),
        pid => format!("process {pid} at {}", socket.display()),
    });
    let shown = |path: PathBuf| path.display().to_string();
    [
        ("registered", registered),
        ("runtime", stand_in::behind().map(shown).map_err(|error| format!("{error:#}"))),
        ("libshunt.so", library::find().map(shown).map_err(|error| format!("{error:#}"))),
        ("broker", broker.map_err(|error| format!("{}: {error}", socket.display()))),
    ]
}

fn report(checks: &[Check]) -> String {
    let line = |(name, found): &Check| match found {
        Ok(found) => format!("ok       {name:<11}  {found}\n"),
        Err(problem) => format!("missing  {name:<11}  {problem}\n"),
    };
    checks.iter().map(line).collect()
}

fn as_json(checks: &[Check]) -> Value {
    let member = |(name, found): &Check| {
        let value = match found {
            Ok(found) => json!({ "found": found }),
            Err(problem) => json!({ "problem": problem }),
        };
        ((*name).to_owned(), value)
    };
    Value::Object(checks.iter().map(member).collect())
}
