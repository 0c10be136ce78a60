//! What is added to a container's configuration so that its connections to other hosts take the host network: the program that its own is
//! started by, and the directory with it. Everything else of the overlay is outside the container.

use std::path::Path;

use object::Endianness;
use object::elf::{FileHeader64, PT_INTERP};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use serde::Deserialize;

use crate::mounts::Mount;
use crate::refusal::Refusal;
use crate::spec::{Linux, Root, add_mounts, missing, not_understood, quoted};
use crate::text::{Container, Splice};

/// The name of the program.
pub const LAUNCHER: &str = "shunt-enter";
/// Where a container has it: beside the shim.
const DIRECTORY: &str = "/usr/local/lib/shunt";
/// A container that says so is left alone: no_new_privs takes what setuid programs have from them.
const OFF: &str = "SHUNT_OVERLAY=off";

/// What is read of a configuration.
#[derive(Deserialize)]
struct Config {
    root: Root,
    process: Process,
    #[serde(default)]
    linux: Linux,
}

#[derive(Deserialize)]
struct Process {
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
}

/// The configuration `text`, of the container whose bundle is there, with its program started by `launcher`, which takes its supervisor
/// from the descriptor `number`.
pub(crate) fn supervise(
    text: &str,
    bundle: &Path,
    launcher: &Path,
    number: i32,
) -> Result<Option<String>, Refusal> {
    let config: Config = serde_json::from_str(text).map_err(not_understood)?;
    if config.linux.has("user") {
        return Err(Refusal::UserNamespace);
    }
    if !config.linux.has("network") {
        return Err(Refusal::HostNetwork);
    }
    if config.process.env.iter().any(|variable| variable == OFF) {
        return Err(Refusal::Off);
    }
    if config.process.args.is_empty() {
        return Err(missing("process.args"));
    }
    check(launcher)?;
    let rootfs = config.root.open(bundle)?;
    let object = Container::object(text, text.trim()).map_err(not_understood)?;
    let process = object.member("process").ok_or_else(|| missing("process"))?;
    let directory = launcher.parent().unwrap_or(Path::new("/"));
    let wanted = [Mount::read_only(directory, Path::new(DIRECTORY))];
    let mut splices = add_mounts(text, &object, &rootfs, wanted)?;
    splices.extend(start(text, process, number)?);
    Ok(Some(Splice::apply(splices, text)))
}

/// The configuration `text` of another process in a container with that configuration: started like the container's, if that is.
pub(crate) fn follow(text: &str, container: &str, number: i32) -> Result<Option<String>, Refusal> {
    if !is_entered(container)? {
        return Ok(None);
    }
    let splices = start(text, text.trim(), number)?;
    Ok(Some(Splice::apply(splices, text)))
}

/// Whether the program of the container with that configuration is started by the launcher.
pub(crate) fn is_entered(container: &str) -> Result<bool, Refusal> {
    #[derive(Deserialize)]
    struct Container {
        process: Process,
    }
    let container: Container = serde_json::from_str(container).map_err(not_understood)?;
    Ok(container.process.args.first().is_some_and(|first| *first == inside()))
}

fn inside() -> String {
    format!("{DIRECTORY}/{LAUNCHER}")
}

/// What has `process`, a part of `text`, started by the launcher.
fn start(text: &str, process: &str, number: i32) -> Result<Vec<Splice>, Refusal> {
    let process = Container::object(text, process).map_err(not_understood)?;
    let args = process.member("args").ok_or_else(|| missing("args"))?;
    let args = Container::array(text, args).map_err(not_understood)?;
    let mut values = args.values();
    let first = values.next().ok_or_else(|| missing("args"))?;
    let decoded: String = serde_json::from_str(first).map_err(not_understood)?;
    let number = quoted(&number.to_string())?;
    if decoded == inside() {
        // A configuration that has been through here before.
        let former = values.next().ok_or_else(|| missing("args"))?;
        return Ok(vec![Splice::replace(text, former, number)]);
    }
    let words = format!("{},{number},\"--\",{first}", quoted(&inside())?);
    Ok(vec![Splice::replace(text, first, words)])
}

/// It has to run in any image.
fn check(launcher: &Path) -> Result<(), Refusal> {
    let wrong = |why: &dyn std::fmt::Display| Refusal::NoLauncher(format!("{}: {why}", launcher.display()));
    let file = std::fs::File::open(launcher).map_err(|error| wrong(&error))?;
    let data = ReadCache::new(file);
    let is_dynamic = || -> object::read::Result<bool> {
        let header = FileHeader64::<Endianness>::parse(&data)?;
        let endian = header.endian()?;
        let headers = header.program_headers(endian, &data)?;
        Ok(headers.iter().any(|header| header.p_type(endian) == PT_INTERP))
    };
    match is_dynamic() {
        Ok(false) => Ok(()),
        Ok(true) => Err(wrong(&"it is not linked statically")),
        Err(error) => Err(wrong(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::Fixture;
    use serde_json::{Value, json};
    use std::path::PathBuf;

    /// An ELF file of 64 bits without a program header, as far as it is looked at.
    fn launcher(fixture: &Fixture) -> PathBuf {
        let mut header = vec![0; 64];
        header[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        header[54] = 56;
        let path = fixture.path("host/shunt-enter");
        std::fs::write(&path, header).unwrap();
        path
    }

    fn config() -> Value {
        json!({
            "process": { "args": ["nginx", "-g", "daemon off;"], "env": ["A=b"] },
            "root": { "path": "rootfs" },
            "linux": { "namespaces": [{ "type": "network" }, { "type": "mount" }] },
        })
    }

    fn enter(fixture: &Fixture, config: &Value) -> Result<Value, Refusal> {
        let bundle = fixture.path("bundle");
        let changed = supervise(&config.to_string(), &bundle, &launcher(fixture), 3)?;
        Ok(serde_json::from_str(&changed.unwrap()).unwrap())
    }

    #[test]
    fn a_program_is_started_by_the_launcher() {
        let fixture = Fixture::new();
        let changed = enter(&fixture, &config()).unwrap();
        let args = json!(["/usr/local/lib/shunt/shunt-enter", "3", "--", "nginx", "-g", "daemon off;"]);
        assert_eq!(changed["process"]["args"], args);
        assert_eq!(changed["process"]["env"], json!(["A=b"]));
        assert_eq!(changed["mounts"][0]["destination"], "/usr/local/lib/shunt");
        assert_eq!(changed["mounts"].as_array().unwrap().len(), 1);
        // Nothing is done twice.
        assert_eq!(enter(&fixture, &changed).unwrap(), changed);

        let process = json!({ "args": ["sh"], "env": [] }).to_string();
        let followed = follow(&process, &changed.to_string(), 3).unwrap().unwrap();
        let followed: Value = serde_json::from_str(&followed).unwrap();
        assert_eq!(followed["args"], json!(["/usr/local/lib/shunt/shunt-enter", "3", "--", "sh"]));
        assert_eq!(follow(&process, &config().to_string(), 3).unwrap(), None);
    }

    #[test]
    fn what_stays_on_the_overlay_is_said() {
        let fixture = Fixture::new();
        let said = |path: &str, value: Value| {
            let mut config = config();
            *config.pointer_mut(path).unwrap() = value;
            enter(&fixture, &config).unwrap_err().to_string()
        };
        assert!(said("/linux/namespaces", json!([])).contains("network of the host"));
        let namespaces = json!([{ "type": "network" }, { "type": "user" }]);
        assert!(said("/linux/namespaces", namespaces).contains("user namespace"));
        assert!(said("/process/env", json!(["SHUNT_OVERLAY=off"])).contains("SHUNT_OVERLAY=off"));
        assert!(said("/process/args", json!([])).contains("process.args"));
        assert!(said("/root/path", json!("no/such")).contains("no/such"));
        let mut taken = config();
        taken["mounts"] = json!([{ "destination": "/usr/local/lib/shunt", "type": "tmpfs" }]);
        assert!(enter(&fixture, &taken).unwrap_err().to_string().contains("/usr/local/lib/shunt"));
    }

    #[test]
    fn the_launcher_must_run_in_any_image() {
        check(&launcher(&Fixture::new())).unwrap();
        let refused = check(Path::new("/bin/sh")).unwrap_err().to_string();
        assert!(refused.contains("not linked statically"), "{refused}");
        assert!(matches!(check(Path::new("/etc/passwd")), Err(Refusal::NoLauncher(_))));
        assert!(matches!(check(Path::new("/no/such")), Err(Refusal::NoLauncher(_))));
    }
}
