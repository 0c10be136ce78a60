//! A container's configuration, OCI's config.json: what is added so that its programs are under shunt.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::image;
use crate::mounts::Mount;
use crate::refusal::Refusal;
use crate::rootfs::Rootfs;
use crate::text::{Container, Splice};

/// Where the shim is on the host, and where the broker's socket is.
#[derive(Clone, Debug)]
pub struct Host {
    /// libshunt.so.
    pub library: PathBuf,
    /// The directory of the system's broker, and nothing else of the host's.
    pub broker: PathBuf,
}

/// Where a container has the shim's directory: where `make install` puts it on a host.
const LIBRARY_DIRECTORY: &str = "/usr/local/lib/shunt";
/// Where the shim looks for a broker, if nothing else is said.
const BROKER_DIRECTORY: &str = "/run/shunt/broker";
const PRELOAD: &str = "LD_PRELOAD";

/// What is read of a configuration.
#[derive(Deserialize)]
struct Config {
    root: Root,
    #[serde(default)]
    linux: Linux,
}

#[derive(Deserialize)]
struct Root {
    path: PathBuf,
}

#[derive(Default, Deserialize)]
struct Linux {
    #[serde(default)]
    namespaces: Vec<Namespace>,
}

#[derive(Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
}

/// The configuration `text`, of the container whose bundle is there, with shunt; nothing if it has all of that already.
pub(crate) fn enter(text: &str, bundle: &Path, host: &Host) -> Result<Option<String>, Refusal> {
    let config: Config = serde_json::from_str(text).map_err(not_understood)?;
    if config.linux.namespaces.iter().any(|namespace| namespace.kind == "user") {
        return Err(Refusal::UserNamespace);
    }
    if !host.broker.is_dir() {
        return Err(Refusal::NoBroker(host.broker.clone()));
    }
    let root = bundle.join(config.root.path);
    let rootfs = Rootfs::open(&root).map_err(|source| Refusal::Rootfs { path: root, source })?;
    image::takes(&rootfs, &host.library)?;
    let object = Container::object(text, text.trim()).map_err(not_understood)?;
    let process = object.member("process").ok_or_else(|| missing("process"))?;
    let mut splices = mount(text, &object, host, &rootfs)?;
    splices.extend(preload(text, process)?);
    Ok((!splices.is_empty()).then(|| Splice::apply(splices, text)))
}

/// The configuration `text` of another process in a container with that configuration: with the shim if the container has it;
/// nothing if there is nothing to add.
pub(crate) fn follow(text: &str, container: &str) -> Result<Option<String>, Refusal> {
    let object = Container::object(container, container.trim()).map_err(not_understood)?;
    let process = object.member("process").ok_or_else(|| missing("process"))?;
    if !preload(container, process)?.is_empty() {
        return Ok(None);
    }
    let splices = preload(text, text.trim())?;
    Ok((!splices.is_empty()).then(|| Splice::apply(splices, text)))
}

/// The mounts that `object`, the configuration, is without.
fn mount(text: &str, object: &Container<'_>, host: &Host, rootfs: &Rootfs) -> Result<Vec<Splice>, Refusal> {
    let there: Vec<Mount> = match object.member("mounts") {
        Some(mounts) => serde_json::from_str(mounts).map_err(not_understood)?,
        None => Vec::new(),
    };
    let directory = host.library.parent().unwrap_or(Path::new("/"));
    let ours = [(directory, LIBRARY_DIRECTORY), (host.broker.as_path(), BROKER_DIRECTORY)];
    let mut added = Vec::new();
    for (source, destination) in ours {
        let mount = Mount::read_only(source, Path::new(destination));
        if mount.is_missing(&there, rootfs)? {
            added.push(serde_json::to_string(&mount).map_err(not_understood)?);
        }
    }
    if added.is_empty() {
        return Ok(Vec::new());
    }
    add(text, object, "mounts", &added.join(",")).map(|splice| vec![splice])
}

/// What puts the shim into the environment of `process`, a part of `text`: before what is preloaded already, as `shunt run` does.
fn preload(text: &str, process: &str) -> Result<Vec<Splice>, Refusal> {
    let process = Container::object(text, process).map_err(not_understood)?;
    let library = format!("{LIBRARY_DIRECTORY}/libshunt.so");
    let variables = match process.member("env") {
        Some(env) => Container::array(text, env).map_err(not_understood)?,
        None => {
            return add(text, &process, "env", &quoted(&format!("{PRELOAD}={library}"))?)
                .map(|splice| vec![splice]);
        }
    };
    let mut splices = Vec::new();
    let mut is_set = false;
    for variable in variables.values() {
        let decoded: String = serde_json::from_str(variable).map_err(not_understood)?;
        let Some(list) = decoded.strip_prefix(PRELOAD).and_then(|rest| rest.strip_prefix('=')) else {
            continue;
        };
        is_set = true;
        if list.split([' ', ':']).any(|entry| entry == library) {
            continue;
        }
        let separator = if list.is_empty() { "" } else { ":" };
        let merged = quoted(&format!("{PRELOAD}={library}{separator}{list}"))?;
        splices.push(Splice::replace(text, variable, merged));
    }
    if !is_set {
        splices.push(variables.append(text, &quoted(&format!("{PRELOAD}={library}"))?));
    }
    Ok(splices)
}

/// Adds elements to the array `name` of `object`, which may not have it yet.
fn add(text: &str, object: &Container<'_>, name: &str, elements: &str) -> Result<Splice, Refusal> {
    match object.member(name) {
        Some(array) => Ok(Container::array(text, array).map_err(not_understood)?.append(text, elements)),
        None => Ok(object.append(text, &format!("\"{name}\":[{elements}]"))),
    }
}

fn quoted(text: &str) -> Result<String, Refusal> {
    serde_json::to_string(text).map_err(not_understood)
}

fn missing(name: &str) -> Refusal {
    Refusal::NotUnderstood(format!("it has no {name}"))
}

fn not_understood(error: serde_json::Error) -> Refusal {
    Refusal::NotUnderstood(error.to_string())
}
