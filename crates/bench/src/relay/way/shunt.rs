//! `shunt relay` on both relays. The client connects to the server's address, and R_C, its router,
//! intercepts the connection.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Running, Way};
use crate::interrupt;
use crate::process::{Process, run};
use crate::relay::lab::{self, EXIT, Host, Lab, MIDDLE_RTT, PORT};

/// The enabled features of the relay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Relay {
    pub(super) early: bool,
    pub(super) pool: bool,
    pub(super) turbo: bool,
    pub(super) encrypt: bool,
}

const RELAY_PORT: u16 = 7440;
const INTERCEPT_PORT: u16 = 7441;
/// How long a relay may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

impl Way for Relay {
    fn start(&self, lab: &Lab) -> Result<Running> {
        new_key(lab, &lab.path("relay.key"))?;
        let exit = relay(lab, Host::Exit, &self.exit(lab))?;
        let edge = relay(lab, Host::Edge, &self.edge(lab))?;
        // Warm connections are opened in the background: a handshake and an authentication at each
        // end.
        interrupt::pause(4 * MIDDLE_RTT)?;
        Ok(Running { target: lab::server(), relays: vec![edge, exit] })
    }
}

impl Relay {
    fn edge(&self, lab: &Lab) -> String {
        let mode = if self.early { "early" } else { "late" };
        // Settings that are not listed keep their defaults.
        let pool = if self.pool { "" } else { "pool = { low = 0, high = 0 }" };
        format!(
            "name = \"edge\"\ncontrol = \"{control}\"\n\n[[peer]]\nname = \"exit\"\naddress = \"{EXIT}:{RELAY_PORT}\"\n\
             key = \"{key}\"\n{pool}\n{leg}\n[[route]]\nto = [\"10.3.0.0/24\"]\n\
             via = \"exit\"\nmode = \"{mode}\"\nsource = \"relay\"\n\n[intercept]\ninterfaces = [\"access\"]\n\
             port = {INTERCEPT_PORT}\n",
            control = control(lab, Host::Edge).display(),
            key = lab.path("relay.key").display(),
            leg = self.leg(lab),
        )
    }

    fn exit(&self, lab: &Lab) -> String {
        format!(
            "name = \"exit\"\ncontrol = \"{control}\"\n\n[accept]\nlisten = [\"{EXIT}:{RELAY_PORT}\"]\n\n\
             [[accept.peer]]\nname = \"edge\"\nkey = \"{key}\"\ntargets = [\"10.3.0.0/24:{PORT}\"]\n{leg}",
            control = control(lab, Host::Exit).display(),
            key = lab.path("relay.key").display(),
            leg = self.leg(lab),
        )
    }

    /// Returns the settings of the leg between the relays.
    fn leg(&self, lab: &Lab) -> String {
        format!(
            "turbo = {}\nencrypt = {}\nbandwidth = \"{}bit\"\nrtt = \"{}ms\"\n",
            self.turbo,
            self.encrypt,
            lab.settings().bits_per_second,
            MIDDLE_RTT.as_millis()
        )
    }
}

fn control(lab: &Lab, host: Host) -> PathBuf {
    lab.path(&format!("relay-{}.sock", host as usize))
}

fn new_key(lab: &Lab, key: &Path) -> Result<()> {
    if key.exists() {
        return Ok(());
    }
    run(Command::new(lab.shunt()).args(["relay", "new-key"]).arg(key)).context("making a key").map(drop)
}

/// Starts a relay and waits until it answers.
fn relay(lab: &Lab, host: Host, config: &str) -> Result<Process> {
    let config = lab.write(&format!("relay-{}.toml", host as usize), config)?;
    let log = lab.path(&format!("relay-{}.log", host as usize));
    let mut command = lab.command(host, lab.shunt());
    command
        .args(["relay", "--config"])
        .arg(config)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log)?);
    let process = Process::spawn(&mut command, "shunt relay")?;
    let mut status = Command::new(lab.shunt());
    status.args(["relay", "status", "--control"]).arg(control(lab, host));
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    let complaint = || format!("shunt relay on {host} does not answer: {}", said().trim());
    interrupt::wait_until(PATIENCE, || Ok(run(&mut status).is_ok()), complaint)?;
    Ok(process)
}
