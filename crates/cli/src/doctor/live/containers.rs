//! Two containers of shunt's runtime, on the default network of Docker or Podman. Their image
//! contains the program and this host's libc, so nothing is downloaded.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::geteuid;

use super::ends::{End, Limit, Output};
use super::pair::Pair;
use super::{Kind, Site, Tried, cause, needs_root};
use crate::broker;
use crate::elf::{self, Elf};
use crate::explain::Cause;

const KIND: Kind = Kind::Containers;
/// Engines are slow. The removal has its own limit.
const LIMIT: Duration = Duration::from_secs(60);
const REMOVAL: Duration = Duration::from_secs(30);
/// The program in the image.
const PROGRAM: &str = "/end";
const PAGE: &str = "docs/containers.md";

pub(super) fn try_it(program: &Path, interrupted: &Arc<AtomicBool>) -> Result<Tried> {
    // The broker shows the programs of containers to root only.
    if !geteuid().is_root() {
        return Ok(Tried::not_tried(KIND, needs_root("Only root sees which transport containers use.")));
    }
    let limit = Limit::new(LIMIT, interrupted);
    let engine = match Engine::find(&limit) {
        Ok(engine) => engine,
        Err(cause) => return Ok(Tried::not_tried(KIND, cause)),
    };
    let socket = Path::new(shunt_broker::SYSTEM_SOCKET);
    if let Err(error) = broker::probe(socket) {
        let lacks = cause(
            "no_system_broker",
            format!("Containers need the system's broker: {}: {error}.", socket.display()),
            "Start it: `systemctl start shunt.socket`, or `shunt daemon --system --detach`.",
        );
        return Ok(Tried::not_tried(KIND, lacks));
    }
    let made = Made::new(engine);
    made.import(&archive(program)?, &limit)?;
    let (server, client) = (made.name("server"), made.name("client"));
    let serving = made.start(&server, &["serve", "0.0.0.0"])?;
    let port = match serving.expect("port", &limit) {
        Ok(port) => port,
        Err(error) if made.engine == "podman" && format!("{error:#}").contains("runtime") => {
            return Ok(Tried::not_tried(KIND, no_runtime(made.engine)));
        }
        Err(error) => return Err(error),
    };
    let (server_pid, address) = made.place(&server, &limit)?;
    let asking = made.start(&client, &["connect", &address, &port])?;
    let (client_pid, _) = made.place(&client, &limit)?;
    let site = Site { broker: Some(socket.to_owned()), socket: socket.to_owned(), why_none: None };
    let pair = Pair { pids: [server_pid, client_pid], server: serving, client: asking };
    let mut tried = pair.exchange(KIND, &port, &site, &limit)?;
    for found in tried.causes.iter_mut().filter(|cause| cause.label == "not_preloaded") {
        *found = cause(
            "left_alone",
            "The runtime has started the containers without shunt.",
            format!("Read why in the runtime's log: {PAGE} has the place."),
        );
    }
    Ok(tried)
}

fn no_runtime(engine: &str) -> Cause {
    let advice = match engine {
        "docker" => "Register it: `sudo shunt runtime register`, then `systemctl reload docker`.".to_owned(),
        _ => format!("Configure it: {PAGE}."),
    };
    cause("no_runtime", format!("The engine of {engine} has no runtime shunt."), advice)
}

/// A container engine that has shunt's runtime.
struct Engine;

impl Engine {
    /// Returns the name of the command of the first engine that can be tried, or why there is none.
    fn find(limit: &Limit) -> Result<&'static str, Cause> {
        let mut first = None;
        for (name, question) in [
            ("docker", "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}"),
            // Podman does not list its runtimes.
            ("podman", "shunt"),
        ] {
            let mut ask = Command::new(name);
            ask.args(["info", "--format", question]);
            let silent = |why: &str| {
                cause(
                    "no_engine",
                    format!("The engine of {name} does not answer: {}.", why.trim_end_matches(['.', '?'])),
                    format!("Start it: `systemctl start {name}`; or ask as a user who may use it."),
                )
            };
            let cause = match limit.run(&mut ask, Command::spawn) {
                Err(error) if is_not_installed(&error) => continue,
                Err(error) => silent(&error.to_string()),
                Ok(output) if !output.is_success => silent(output.complaint()),
                Ok(output) if output.stdout.split(' ').any(|runtime| runtime == "shunt") => return Ok(name),
                Ok(_) => no_runtime(name),
            };
            first.get_or_insert(cause);
        }
        Err(first.unwrap_or_else(|| {
            cause(
                "no_engine",
                "Neither Docker nor Podman is installed.",
                format!("No action needed without containers. For those of containerd alone see {PAGE}."),
            )
        }))
    }
}

fn is_not_installed(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::NotFound)
}

/// An image and containers, which are removed when this is dropped.
struct Made {
    engine: &'static str,
    /// The name of the image. Those of the containers begin with it.
    image: String,
}

impl Made {
    fn new(engine: &'static str) -> Made {
        Made { engine, image: format!("shunt-doctor-{}", std::process::id()) }
    }

    fn name(&self, end: &str) -> String {
        format!("{}-{end}", self.image)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.engine);
        command.args(arguments);
        command
    }

    fn run(&self, arguments: &[&str], limit: &Limit) -> Result<Output> {
        let output = limit.run(&mut self.command(arguments), Command::spawn)?;
        ensure!(output.is_success, "{} {}: {}", self.engine, arguments[0], output.complaint());
        Ok(output)
    }

    /// Makes the image.
    fn import(&self, archive: &[u8], limit: &Limit) -> Result<()> {
        let archive = archive.to_owned();
        let mut command = self.command(&["import", "-", &self.image]);
        let output = limit.run(&mut command, |command| {
            let mut child = command.stdin(Stdio::piped()).spawn()?;
            let mut stdin = child.stdin.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
            // The engine reads all of it, or ends.
            std::thread::spawn(move || stdin.write_all(&archive));
            Ok(child)
        })?;
        ensure!(output.is_success, "{} import: {}", self.engine, output.complaint());
        Ok(())
    }

    fn start(&self, name: &str, arguments: &[&str]) -> Result<End> {
        let mut command = self.command(&["run", "--rm", "--interactive", "--runtime=shunt"]);
        command.arg(format!("--name={name}")).args([&self.image, PROGRAM]).args(arguments);
        let child = End::pipes(&mut command).spawn().context("a container cannot be started")?;
        End::of(child)
    }

    /// Returns the process id and the address of a container, once it runs.
    fn place(&self, name: &str, limit: &Limit) -> Result<(u32, String)> {
        let question = "{{.State.Pid}} {{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}";
        loop {
            let asked = self.run(&["inspect", "--format", question, name], limit);
            let text = asked.map(|output| output.stdout).unwrap_or_default();
            let mut words = text.split_whitespace();
            match words.next().and_then(|pid| pid.parse().ok()) {
                Some(pid) if pid > 0 => {
                    let Some(address) = words.next() else {
                        bail!("the engine gives its containers no addresses");
                    };
                    return Ok((pid, address.to_owned()));
                }
                _ => limit.pause()?,
            }
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // The removal goes on after a signal.
        let never = Arc::new(AtomicBool::new(false));
        let limit = Limit::new(REMOVAL, &never);
        let [server, client] = ["server", "client"].map(|end| self.name(end));
        let _ = self.run(&["rm", "--force", &server, &client], &limit);
        let _ = self.run(&["rmi", "--force", &self.image], &limit);
    }
}

/// Returns a tar archive of the program, its dynamic linker and its libc.
fn archive(program: &Path) -> Result<Vec<u8>> {
    let mut archive = Vec::new();
    let content = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    add(&mut archive, Path::new(PROGRAM), &content(program)?)?;
    let linker = linker_of(program)?;
    add(&mut archive, &linker, &content(&linker)?)?;
    let libc = libc()?;
    // Without the links of a merged /usr, programs and shunt's runtime look for it in /lib.
    let place = libc.strip_prefix("/usr").unwrap_or(&libc);
    add(&mut archive, place, &content(&libc)?)?;
    archive.extend([0; 1024]);
    Ok(archive)
}

/// Returns the dynamic linker, by the path that the program names.
fn linker_of(program: &Path) -> Result<PathBuf> {
    match elf::parse(&File::open(program)?) {
        Some(Elf::Native { interpreter: Some(linker), .. }) => Ok(OsStr::from_bytes(&linker).into()),
        _ => bail!("the program names no dynamic linker"),
    }
}

/// Returns the path of this command's libc.
fn libc() -> Result<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let path = |line: &str| line.split_whitespace().nth(5).map(PathBuf::from);
    let mut paths = maps.lines().filter_map(path);
    let libc = paths.find(|path| path.file_name().is_some_and(|name| name == "libc.so.6"));
    libc.context("this command has no libc.so.6")
}

/// Adds a file to a tar archive, in the format of POSIX (ustar).
fn add(archive: &mut Vec<u8>, path: &Path, content: &[u8]) -> Result<()> {
    const BLOCK: usize = 512;
    const NAME: usize = 100;
    let name = path.strip_prefix("/").unwrap_or(path).as_os_str().as_bytes();
    ensure!(name.len() < NAME, "{} is too long", path.display());
    let mut header = [0; BLOCK];
    let mut put = |at: usize, field: &[u8]| header[at..at + field.len()].copy_from_slice(field);
    put(0, name);
    for (at, value) in [(100, "0000755"), (108, "0000000"), (116, "0000000"), (136, "00000000000")] {
        put(at, value.as_bytes());
    }
    put(124, format!("{:011o}", content.len()).as_bytes());
    // The sum is taken with spaces in its own place.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    archive.extend(header);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::ends;
    use super::*;

    #[test]
    fn archive_is_one_that_tar_reads() {
        let programs = ends::Programs::make().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), archive(programs.dynamic()).unwrap()).unwrap();
        let list = Command::new("tar").arg("-tvf").arg(file.path()).output().unwrap();
        assert!(list.status.success(), "{list:?}");
        let list = String::from_utf8(list.stdout).unwrap();
        assert!(list.contains("-rwxr-xr-x") && list.contains("libc.so.6"), "{list}");
        let content = Command::new("tar").args(["-xOf"]).arg(file.path()).arg("end").output().unwrap();
        assert_eq!(content.stdout, fs::read(programs.dynamic()).unwrap());
    }
}
