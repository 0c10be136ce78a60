//! Round trips between two Docker containers on Docker's bridge, with the ordinary runtime and with
//! shunt's, as `docker run --runtime=shunt` starts them. The engine, the runtime and the system's
//! broker must exist. The image is created here and removed at the end.

use std::cell::OnceCell;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_abi::status::Snapshot;

use super::Group;
use super::point::{Load, Point, Sample};
use super::tables::{SIZES, Table, Unit, bytes};
use crate::find;
use crate::interrupt::wait_until;
use crate::process::{self, Process, run};
use crate::side::Side;
use crate::stage::{Role, Stage};
use crate::worker::{BEGIN, Measured, READY};

pub(super) fn table() -> Table {
    let image = Rc::new(Image::default());
    let point =
        |size| Point::new(bytes(size), SIDES, InContainers { size, image: Rc::clone(&image) }).at(size);
    Table {
        group: Group::Containers,
        title: "Round trip, blocking, two containers of Docker".to_owned(),
        unit: Unit::Microseconds,
        axis: Some("bytes"),
        points: SIZES.map(point).into(),
    }
}

const SIDES: &[Side] = &[Side::Tcp, Side::ShuntSleep, Side::Shunt];
/// How long a program may take to be ready, to end, or to report its results. Containers are slow.
const LIMIT: Duration = Duration::from_secs(60);
/// The overhead of a turn: two containers start and end.
const AROUND: Duration = Duration::from_secs(2);
/// The warm-up of a client in seconds, in which its PID is determined.
const WARM: &str = "0.5";
/// The path of this program in a container.
const PROGRAM: &str = "/shunt";
/// The name that `shunt runtime register` uses.
const RUNTIME: &str = "shunt";
/// The engine's default runtime.
const ORDINARY: &str = "runc";
const BROKER: &str = "/run/shunt/broker/broker.sock";

struct InContainers {
    size: usize,
    image: Rc<Image>,
}

impl Load for InContainers {
    fn missing(&self) -> Option<String> {
        let runtimes = ["info", "--format", "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}"];
        if find::program("docker").is_none() {
            return Some("docker is not installed: `apt-get install docker.io`".to_owned());
        }
        match docker(runtimes) {
            Err(error) => Some(format!(
                "Docker's engine does not answer: `systemctl start docker`, or say in DOCKER_HOST where it is ({error:#})"
            )),
            Ok(names) if !names.split(' ').any(|name| name == RUNTIME) => Some(
                "Docker's engine has no runtime shunt: `shunt runtime register` and `systemctl reload docker`".to_owned(),
            ),
            Ok(_) => status_here().err().map(|error| {
                format!("the system's broker does not answer: `shunt daemon --system --detach` ({error:#})")
            }),
        }
    }

    fn around(&self) -> Duration {
        AROUND
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let image = self.image.name(stage)?;
        let size = self.size.to_string();
        let listen = ["echo", "--style", "blocking", "--at", "0.0.0.0:0", "--size", &size];
        let mut server = Container::start(image, stage, side, Role::Server, &listen)?;
        let listens = server.process.expect(READY)?;
        let (_, port) =
            listens.rsplit_once(':').with_context(|| format!("the server listens at {listens:?}"))?;
        let address = format!("{}:{port}", server.address);
        let time = seconds.as_secs_f64().to_string();
        let ask = ["round-trip", "--to", &address, "--size", &size, "--warm", WARM, "--seconds", &time];
        let mut client = Container::start(image, stage, side, Role::Client, &ask)?;
        client.process.expect(BEGIN)?;
        let pids = [server.pid, client.pid];
        let cpu = || pids.map(|pid| process::cpu_of_trees(&[pid]));
        let before = cpu();
        let measured: Measured = client.process.results(seconds)?;
        let after = cpu();
        let [server_cpu, client_cpu] = [0, 1].map(|which| after[which].saturating_sub(before[which]));
        let mut sample = Sample::of(&measured, server_cpu, client_cpu);
        if side.is_under_shunt() {
            // The broker shows all connections to a process in its own network namespace.
            sample.look(&status(stage.shunt_outside())?, &address);
            let all = process::trees(&pids);
            sample.link_bytes = all.into_iter().map(process::link_bytes).sum();
        }
        client.finish()?;
        server.finish()?;
        Ok(sample)
    }
}

/// An image with the libraries of this program, which is mounted into the container.
#[derive(Default)]
struct Image(OnceCell<String>);

impl Image {
    /// Returns the image's name. The image is created at the first call.
    fn name(&self, stage: &Stage) -> Result<&str> {
        if self.0.get().is_none() {
            let _ = self.0.set(import(stage).context("making an image")?);
        }
        self.0.get().map(String::as_str).context("made")
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some(name) = self.0.get() {
            let _ = docker(["rmi", "--force", name]);
        }
    }
}

fn import(stage: &Stage) -> Result<String> {
    let (tree, archive) = (stage.path("tree"), stage.path("tree.tar"));
    let program = find::own()?;
    for library in libraries(&program)? {
        let to = tree.join(library.strip_prefix("/").context("an absolute path")?);
        std::fs::create_dir_all(to.parent().context("a library has a directory")?)?;
        std::fs::copy(&library, &to).with_context(|| format!("copying {}", library.display()))?;
    }
    run(Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&archive).arg("."))?;
    let name = own_name("image");
    docker(["import".as_ref(), archive.as_os_str(), name.as_ref()])?;
    Ok(name)
}

/// Returns the libraries of a program, including the dynamic linker.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let text = run(Command::new("ldd").arg(program).env_remove("LD_PRELOAD"))?;
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// A synthetic load in a container, which ends with it.
struct Container {
    name: String,
    process: Process,
    /// The PID of its first process.
    pid: u32,
    address: String,
}

impl Container {
    fn start(image: &str, stage: &Stage, side: Side, role: Role, load: &[&str]) -> Result<Container> {
        let (name, cpu) = match role {
            Role::Server => (own_name("server"), stage.cpus().0),
            Role::Client => (own_name("client"), stage.cpus().1),
        };
        let mut command = Command::new(find::installed("docker")?);
        // With Docker's init process, a signal to the command ends the load. Without it the load
        // would be the container's init process, which ignores signals without a handler.
        command.args(["run", "--rm", "--interactive", "--init", "--log-driver=none", "--pull=never"]);
        command.arg("--network=bridge");
        command.arg(format!("--name={name}")).arg(format!("--cpuset-cpus={cpu}"));
        let runtime = if side.is_under_shunt() { RUNTIME } else { ORDINARY };
        command.arg(format!("--runtime={runtime}"));
        if let Some(spin) = side.spin(role) {
            command.arg(format!("--env={}={spin}", shunt_abi::env::SPIN));
            command.arg(format!("--env={}=trust", shunt_abi::env::OWN_CALLS));
        }
        let program = find::own()?;
        command.arg(format!("--volume={}:{PROGRAM}:ro", program.display()));
        command.args([image, PROGRAM, "bench-worker"]).args(load);
        let process = Process::spawn_with_lines(&mut command, &name)?;
        let mut container = Container { name, process, pid: 0, address: String::new() };
        container.await_start()?;
        Ok(container)
    }

    fn await_start(&mut self) -> Result<()> {
        let format = "{{.State.Pid}} {{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}";
        let name = self.name.clone();
        let is_started = || {
            ensure!(!self.process.has_ended()?, "{} ended too early", self.name);
            // Docker does not know the container before it exists.
            let said = docker(["inspect", "--format", format, &self.name]).unwrap_or_default();
            let (pid, address) = said.split_once(' ').unwrap_or_default();
            (self.pid, self.address) = (pid.parse().unwrap_or(0), address.to_owned());
            Ok(!self.address.is_empty())
        };
        wait_until(LIMIT, is_started, || format!("{name} does not start"))
    }

    /// Ends the load, and with it the container.
    fn finish(mut self) -> Result<()> {
        self.process.close_input();
        ensure!(self.process.ends_within(LIMIT)?, "{} does not end", self.name);
        let status = self.process.end()?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if !matches!(self.process.has_ended(), Ok(true)) {
            let _ = docker(["rm", "--force", &self.name]);
        }
    }
}

/// Returns a unique name.
fn own_name(what: &str) -> String {
    format!("shunt-bench-{}-{what}", std::process::id())
}

/// Returns the status of the system's broker, as reported to this command.
fn status(mut shunt: Command) -> Result<Snapshot> {
    let said = run(shunt.args(["status", "--json", "--broker", BROKER]))?;
    serde_json::from_str(&said).context("the broker's answer")
}

/// Returns the status of the system's broker, as reported to the calling thread's namespace.
fn status_here() -> Result<Snapshot> {
    status(Command::new(find::shunt()?))
}

/// Runs docker with these arguments, in a separate process group, so that an interrupt of the
/// comparison does not stop the clean-up. Returns its output.
fn docker<A: AsRef<std::ffi::OsStr>>(words: impl IntoIterator<Item = A>) -> Result<String> {
    run(Command::new(find::installed("docker")?).args(words).process_group(0))
}
