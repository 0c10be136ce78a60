//! Two network namespaces on a bridge, as containers have them: one for the server, one for the client. They have no
//! name and are gone with this program.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use nix::sched::{CloneFlags, unshare};

use crate::stage::Role;

/// See the module.
pub(crate) struct Bridge {
    server: File,
    client: File,
}

/// On the bridge, the end of the server, the end of the client.
const BRIDGE: &str = "10.213.7.1";
const SERVER: &str = "10.213.7.2";
const CLIENT: &str = "10.213.7.3";

impl Bridge {
    /// Builds it in the namespace of the calling thread, which must be ours alone.
    pub(crate) fn build() -> Result<Bridge> {
        words(None, "ip link add shunt0 type bridge")?;
        words(None, &format!("ip address add {BRIDGE}/24 dev shunt0"))?;
        words(None, "ip link set shunt0 up")?;
        let bridge = Bridge { server: namespace()?, client: namespace()? };
        for (role, name, address) in [(Role::Server, "server", SERVER), (Role::Client, "client", CLIENT)] {
            let inside = bridge.path(role);
            words(None, &format!("ip link add {name} type veth peer name shunt-peer"))?;
            words(None, &format!("ip link set {name} master shunt0 up"))?;
            words(None, &format!("ip link set shunt-peer netns {}", inside.display()))?;
            for line in [
                "ip link set lo up",
                "ip link set shunt-peer name eth0",
                &format!("ip address add {address}/24 dev eth0"),
                "ip link set eth0 up",
            ] {
                words(Some(&inside), line)?;
            }
        }
        Ok(bridge)
    }

    /// Where the server's programs are reached from the client's namespace.
    pub(crate) fn host(&self) -> &'static str {
        SERVER
    }

    /// For `nsenter --net=`.
    pub(crate) fn path(&self, role: Role) -> PathBuf {
        let handle = match role {
            Role::Server => &self.server,
            Role::Client => &self.client,
        };
        format!("/proc/{}/fd/{}", std::process::id(), handle.as_raw_fd()).into()
    }
}

/// A new one, made on a thread that ends with it.
fn namespace() -> Result<File> {
    let made = std::thread::spawn(|| -> Result<File> {
        unshare(CloneFlags::CLONE_NEWNET)?;
        Ok(File::open("/proc/thread-self/ns/net")?)
    });
    made.join().map_err(|_| anyhow!("the thread panicked"))?.context("making a network namespace")
}

fn words(inside: Option<&PathBuf>, line: &str) -> Result<()> {
    let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    if let Some(path) = inside {
        words.splice(0..0, ["nsenter".to_owned(), format!("--net={}", path.display())]);
    }
    let output = Command::new(&words[0])
        .args(&words[1..])
        .output()
        .with_context(|| format!("{} is needed", words[0]))?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
