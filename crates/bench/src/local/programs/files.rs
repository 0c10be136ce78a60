//! Programs that copy files over connections of their own protocols: an object store (nginx with
//! WebDAV, and curl), Samba, and an rsync daemon.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Result;

use super::bulk::{MOVED, timed};
use super::nginx::serve;
use super::{Address, Program, said_by_ours};
use crate::find;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Role, Stage};
use crate::worker::Measured;

/// Returns a directory with a file named `file` of [`MOVED`] bytes.
fn directory(stage: &Stage) -> Result<PathBuf> {
    let directory = stage.path("files");
    std::fs::create_dir_all(&directory)?;
    let file = directory.join("file");
    if !file.exists() {
        std::fs::write(file, vec![b'x'; MOVED])?;
    }
    Ok(directory)
}

/// An object that is stored by PUT, as clients of S3 do it.
pub(super) struct Objects;

impl Program for Objects {
    fn needs(&self) -> &[&str] {
        &["nginx", "curl"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let root = stage.path(&format!("objects-{}", address.port));
        std::fs::create_dir_all(&root)?;
        let site = format!(
            "server {{ listen {}:PORT; root {}; dav_methods PUT; client_max_body_size 0; }}",
            address.host,
            root.display()
        );
        Ok(vec![serve(stage, side, Role::Server, address.port, &site)?])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, _: Duration) -> Result<Command> {
        let mut client = timed(stage, side, address, "curl")?;
        client.args(["--silent", "--show-error", "--fail", "--upload-file"]);
        client.arg(directory(stage)?.join("file"));
        client.arg(format!("http://{}:{}/object", address.host, address.port));
        Ok(client)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}

/// A file that a client reads from a share.
pub(super) struct Samba;

impl Program for Samba {
    fn needs(&self) -> &[&str] {
        &["smbd", "smbclient"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let own = stage.path(&format!("samba-{}", address.port));
        std::fs::create_dir_all(&own)?;
        let configuration = own.join("conf");
        let (at, root) = (own.display(), directory(stage)?);
        let text = format!(
            "[global]\ninterfaces = lo\nbind interfaces only = yes\nsmb ports = {}\nprivate dir = {at}\n\
             state directory = {at}\ncache directory = {at}\nlock directory = {at}\npid directory = {at}\n\
             ncalrpc dir = {at}/rpc\nlog file = {at}/log\nmap to guest = Bad User\ndisable netbios = yes\n\
             load printers = no\n[files]\npath = {}\nguest ok = yes\nforce user = root\n",
            address.port,
            root.display()
        );
        std::fs::write(&configuration, text)?;
        let mut server = stage.command(&find::installed("smbd")?, side, Role::Server, address.placement)?;
        server.args(["--foreground", "--no-process-group", "--configfile"]).arg(&configuration);
        Ok(vec![Process::spawn(server.stdout(Stdio::null()).stderr(Stdio::null()), "smbd")?])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, _: Duration) -> Result<Command> {
        let mut client = timed(stage, side, address, "smbclient")?;
        client.args(["--no-pass", "--configfile", "/dev/null", "--port", &address.port.to_string()]);
        client.arg(format!("//{}/files", address.host)).args(["--command", "get file /dev/null"]);
        Ok(client)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}

/// A file that a client reads from an rsync daemon.
pub(super) struct Rsync;

impl Program for Rsync {
    fn needs(&self) -> &[&str] {
        &["rsync"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let root = directory(stage)?;
        let user = if rustix::process::geteuid().is_root() { "uid = root\ngid = root\n" } else { "" };
        let configuration = stage.path(&format!("rsync-{}.conf", address.port));
        let text = format!("use chroot = no\n{user}[files]\npath = {}\n", root.display());
        std::fs::write(&configuration, text)?;
        let mut server = stage.command(&find::installed("rsync")?, side, Role::Server, address.placement)?;
        server.args(["--daemon", "--no-detach", "--address", address.host]);
        server.args(["--port", &address.port.to_string(), "--config"]).arg(&configuration);
        Ok(vec![Process::spawn(server.stdout(Stdio::null()).stderr(Stdio::null()), "rsync")?])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, _: Duration) -> Result<Command> {
        let mut client = timed(stage, side, address, "rsync")?;
        // It would skip a file that is there already.
        client.args(["--whole-file", "--inplace", "--ignore-times"]);
        client.arg(format!("rsync://{}:{}/files/file", address.host, address.port)).arg(stage.path("copy"));
        Ok(client)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}
