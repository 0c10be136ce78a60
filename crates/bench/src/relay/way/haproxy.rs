//! HAProxy on both relays, which forwards TCP with splice(2).
//!
//! The variant with a large window gets through the hosts' settings what turbo start gives to shunt
//! relay: an initial window of the bandwidth-delay product between the relays in both directions,
//! and buffers of that size.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Result;

use super::{Running, Way};
use crate::find;
use crate::process::Process;
use crate::relay::lab::{self, EDGE, EXIT, Host, Lab};

/// HAProxy as a way.
pub(super) struct Haproxy {
    pub(super) large_window: bool,
}

const PORT: u16 = 8080;
/// The connection limit, which is never reached. Each connection may take two and a half of the
/// process's descriptors.
const MOST: usize = 4_000;
const SEGMENT: u64 = 1_448;
/// The sysctls of the buffers, which are restored afterwards.
const BUFFERS: [&str; 2] = ["tcp_rmem", "tcp_wmem"];

impl Way for Haproxy {
    fn missing(&self) -> Option<String> {
        find::missing(&["haproxy"])
    }

    fn start(&self, lab: &Lab) -> Result<Running> {
        if self.large_window {
            widen(lab)?;
        }
        let exit = proxy(lab, Host::Exit, EXIT, lab::server())?;
        let edge = proxy(lab, Host::Edge, EDGE, (EXIT, PORT).into())?;
        Ok(Running { target: (EDGE, PORT).into(), relays: vec![edge, exit] })
    }

    fn end(&self, lab: &Lab) -> Result<()> {
        if self.large_window { narrow(lab) } else { Ok(()) }
    }
}

fn proxy(lab: &Lab, host: Host, listen: Ipv4Addr, next: SocketAddr) -> Result<Process> {
    let config = format!(
        "global\n  maxconn {MOST}\ndefaults\n  mode tcp\n  option splice-auto\n  timeout connect 10s\n  \
         timeout client 1h\n  timeout server 1h\nlisten relay\n  bind {listen}:{PORT}\n  server next {next}\n"
    );
    let config = lab.write(&format!("haproxy-{}.cfg", host as usize), &config)?;
    let mut command = lab.command(host, find::installed("haproxy")?);
    let log = lab.path(&format!("haproxy-{}.log", host as usize));
    command.args(["-db", "-f"]).arg(config).stderr(File::create(&log)?);
    let process = Process::spawn(&mut command, "HAProxy")?;
    lab.await_listener(host, PORT, &log)?;
    Ok(process)
}

fn widen(lab: &Lab) -> Result<()> {
    let leg = lab.middle_bytes();
    let window = leg.div_ceil(SEGMENT);
    for host in [Host::Edge, Host::Exit] {
        lab.words(host, &format!("{} initcwnd {window} initrwnd {window}", route(host)))?;
        for name in BUFFERS {
            // Half of a receive buffer is window, and up to twice the bandwidth-delay product is in
            // flight.
            lab.set(host, name, &format!("4096 {} {}", 4 * leg, 8 * leg))?;
        }
    }
    Ok(())
}

fn narrow(lab: &Lab) -> Result<()> {
    for host in [Host::Edge, Host::Exit] {
        lab.words(host, route(host))?;
        for name in BUFFERS {
            lab.set(host, name, &lab.setting(Host::Client, name)?)?;
        }
    }
    Ok(())
}

/// Returns the command that replaces the connected route between the relays.
fn route(host: Host) -> &'static str {
    match host {
        Host::Exit => "ip route replace 10.2.0.0/24 dev middle proto kernel scope link src 10.2.0.2",
        _ => "ip route replace 10.2.0.0/24 dev middle proto kernel scope link src 10.2.0.1",
    }
}
