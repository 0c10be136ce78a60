//! `shunt attach` and `shunt detach`: enter and leave a program that runs.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::process::geteuid;
use shunt_abi::{env, rules};
use shunt_attach::Detached;
use shunt_sys::proc::Fields;

use crate::args::{AttachArgs, DetachArgs, Transport};
use crate::config::OfPrograms;
use crate::{broker, library, obstacle};

/// Returns the names by which the configuration may know a process: that of its command line, which
/// is the first, and that of its file.
fn names_of(pid: u32) -> Result<[String; 2]> {
    let none = || format!("there is no process {pid} that you may look into");
    let path = std::fs::read_link(format!("/proc/{pid}/exe")).with_context(none)?;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).with_context(none)?;
    let first = line.split(|byte| [0, b' '].contains(byte)).next().unwrap_or_default();
    // nginx names itself `nginx: master process`.
    Ok([first, path.as_os_str().as_bytes()]
        .map(|path| String::from_utf8_lossy(rules::name_of(path)).trim_end_matches(':').to_owned()))
}

/// Returns the broker's socket for a process. A process of another user cannot reach this user's
/// broker.
fn broker_for(pid: u32, asked: Option<&Path>) -> Result<PathBuf, String> {
    let owner = Fields::status(pid).ok().and_then(|status| status.word::<u32>("Uid", 1));
    let system = Path::new(shunt_broker::SYSTEM_SOCKET);
    match owner {
        Some(owner) if asked.is_none() && owner != geteuid().as_raw() => match broker::probe(system) {
            Ok(_) => Ok(system.to_owned()),
            Err(why) => Err(format!(
                "it runs as user {owner}, who needs the system's broker, {}: {why}. Start that with \
                 `systemctl start shunt.socket`, or name a broker that this user can reach by `--broker`",
                system.display()
            )),
        },
        _ => broker::reach(asked).map_err(|error| error.why),
    }
}

/// Runs `shunt attach`.
pub(crate) fn attach(args: &AttachArgs) -> Result<()> {
    let pid = args.pid;
    let [name, file] = names_of(pid)?;
    let refuse = |why: &dyn std::fmt::Display| format!("{name} (pid {pid}) goes on without shunt: {why}");
    if let Some(obstacle) = obstacle::of_linkage(Path::new(&format!("/proc/{pid}/exe"))) {
        bail!("{}. {}", refuse(&obstacle), obstacle.advice(&name));
    }
    let configured = match OfPrograms::read() {
        Ok(configured) if [&name, &file].iter().any(|name| configured.transport(name) == Transport::Tcp) => {
            bail!(refuse(&"the configuration keeps it on TCP"))
        }
        Ok(configured) => configured,
        Err(faults) => bail!(refuse(&faults)),
    };
    let library = library::find()?;
    let socket = broker_for(pid, args.broker.as_deref()).map_err(|why| anyhow::anyhow!(refuse(&why)))?;
    let rules = configured.rules();
    let mut settings = vec![(env::BROKER, socket.as_os_str().as_bytes())];
    settings.extend(rules.as_ref().map(|rules| (env::RULES, rules.as_bytes())));
    let done = shunt_attach::attach(pid, &library, &socket, &settings)
        .map_err(|why| anyhow::anyhow!(refuse(&why)))?;
    let millis = done.stopped.as_micros() as f64 / 1000.0;
    writeln!(
        std::io::stdout(),
        "{name} (pid {pid}) is under shunt: it was stopped for {millis:.1} ms. New connections may use shared \
         memory{}.",
        match done.connections {
            0 => String::from("; none of those that it has could be taken over"),
            count => format!(", and {count} of those that it has"),
        }
    )?;
    Ok(())
}

/// Runs `shunt detach`.
pub(crate) fn detach(args: &DetachArgs) -> Result<()> {
    let pid = args.pid;
    let [name, _] = names_of(pid)?;
    let how = match shunt_attach::detach(pid).with_context(|| format!("{name} (pid {pid})"))? {
        Detached::Left => "is not under shunt any more: all its connections are on TCP.",
        Detached::Leaving => {
            "sends by TCP again. shunt ends its work when the program has read what is left in shared memory."
        }
    };
    writeln!(std::io::stdout(), "{name} (pid {pid}) {how}")?;
    Ok(())
}
