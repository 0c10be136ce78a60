//! ssh's port forwarding, the paper's baseline: sshd on R_S, and `ssh -L` on R_C. Its connection is
//! established before the client's, and carries all forwarded ones.

use std::fs::File;
use std::process::Command;

use anyhow::Result;

use super::{Running, Way};
use crate::find;
use crate::process::{Process, run};
use crate::relay::lab::{EDGE, EXIT, Host, Lab, PORT, SERVER};

/// ssh's port forwarding as a way.
pub(super) struct Forwarding;

const FORWARDED: u16 = 8022;
const SSH: u16 = 22;

impl Way for Forwarding {
    fn missing(&self) -> Option<String> {
        find::missing(&["sshd", "ssh", "ssh-keygen", "unshare"])
    }

    fn start(&self, lab: &Lab) -> Result<Running> {
        for key in ["host_key", "user_key"] {
            make_key(lab, key)?;
        }
        std::fs::copy(lab.path("user_key.pub"), lab.path("authorized_keys"))?;
        let (server_log, client_log) = (lab.path("sshd.log"), lab.path("ssh.log"));
        let server = Process::spawn(server(lab)?.stderr(File::create(&server_log)?), "sshd")?;
        lab.await_listener(Host::Exit, SSH, &server_log)?;
        let client = Process::spawn(client(lab).stderr(File::create(&client_log)?), "ssh")?;
        lab.await_listener(Host::Edge, FORWARDED, &client_log)?;
        Ok(Running { target: (EDGE, FORWARDED).into(), relays: vec![client, server] })
    }
}

fn make_key(lab: &Lab, name: &str) -> Result<()> {
    let path = lab.path(name);
    if path.exists() {
        return Ok(());
    }
    let mut command = Command::new("ssh-keygen");
    run(command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path)).map(drop)
}

/// Returns the command of sshd. Its session processes leave its process group, so all run in a PID
/// namespace, which ends as a whole. Its empty directory is in a private /run.
fn server(lab: &Lab) -> Result<Command> {
    let here = lab.path("").display().to_string();
    let config = format!(
        "ListenAddress {EXIT}:{SSH}\nHostKey {here}host_key\nAuthorizedKeysFile {here}authorized_keys\nPidFile none\n\
         StrictModes no\nUsePAM no\nPermitRootLogin yes\nAllowTcpForwarding yes\n"
    );
    let config = lab.write("sshd_config", &config)?;
    let script = "mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec \"$0\" -D -e -f \"$1\"";
    let mut command = lab.command(Host::Exit, "unshare");
    command
        .args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script])
        .arg(find::installed("sshd")?)
        .arg(config);
    Ok(command)
}

fn client(lab: &Lab) -> Command {
    let mut command = lab.command(Host::Edge, "ssh");
    command.args(["-N", "-F", "/dev/null", "-i"]).arg(lab.path("user_key"));
    for option in [
        "BatchMode=yes",
        "ExitOnForwardFailure=yes",
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
    ] {
        command.args(["-o", option]);
    }
    command.args(["-L", &format!("{EDGE}:{FORWARDED}:{SERVER}:{PORT}"), &format!("root@{EXIT}")]);
    command
}
