//! Runs PostgreSQL in the server's container.

use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;

use super::lab::{B, Lab, find};

/// Returns a program of PostgreSQL. They refuse to run as root.
pub(crate) fn command(lab: &Lab, host: usize, is_supervised: bool, name: &str) -> Command {
    let mut command = lab.command(host, is_supervised, "setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--"]).arg(find(name));
    command
}

/// Starts a server with an empty database, which trusts all clients of the overlay.
pub(crate) fn serve(lab: &mut Lab) {
    let data = lab.path("data");
    fs::create_dir(&data).unwrap();
    let id = |flag: &str| {
        let output = Command::new("id").args([flag, "postgres"]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().parse::<u32>().expect("there is a user postgres")
    };
    chown(&data, Some(id("-u")), Some(id("-g"))).unwrap();
    let mut initdb = command(lab, B, false, "initdb");
    initdb.args(["--auth=trust", "--no-sync", "--username=postgres", "--encoding=UTF8", "--pgdata"]);
    let output = lab.output(B, initdb.arg(&data));
    assert!(output.status.success(), "{output:?}");
    fs::write(data.join("pg_hba.conf"), "host all all 10.50.0.0/16 trust\n").unwrap();
    let mut server = command(lab, B, true, "postgres");
    server.arg("-D").arg(&data).args(["-c", "listen_addresses=*", "-c", "unix_socket_directories="]);
    lab.launch(B, server.args(["-c", "fsync=off"]), "ready to accept connections");
}
