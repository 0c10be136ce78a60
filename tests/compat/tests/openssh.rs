//! OpenSSH, as Debian builds it: commands, files of 80 MB by scp and sftp, and a forwarded port.
//!
//! sshd executes itself again for each connection. A separate process in a chroot and under a
//! seccomp filter then authenticates the client. For root, one process has the connection
//! afterwards. For other users, two processes hold it until it ends, so it stays on TCP.

use shunt_abi::reason::Reason;
use shunt_compat::{Expected, Host, Program, TransportWatch, both};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// The size of a transfer. A session falls back to TCP when it forks, and is offered again after
/// some hundred operations of up to 32 KiB. The transfer must take longer than that.
const FILE: usize = 80_000_000;
/// A user with a shell, from a package that another test needs.
const OTHER: &str = "postgres";

struct Server {
    _program: Program,
    port: u16,
}

impl Server {
    fn start(host: &Host) -> Server {
        for key in ["host_key", "key"] {
            host.program("ssh-keygen")
                .native()
                .words("-q -t ed25519 -N")
                .args(["", "-f"])
                .arg(host.path(key))
                .run("ssh-keygen", LIMIT);
        }
        fs::copy(host.path("key.pub"), host.path("authorized_keys")).expect("own directory");
        let port = host.port();
        let here = host.dir().display();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {here}/host_key\nPidFile none\n\
             AuthorizedKeysFile {here}/authorized_keys\nStrictModes no\nUsePAM yes\nPermitRootLogin yes\n\
             Subsystem sftp /usr/lib/openssh/sftp-server\nAllowTcpForwarding yes\n"
        );
        let config = host.write("sshd_config", config);
        // sshd's empty directory is in a private /run.
        let script = "mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec \"$0\" -D -e -f \"$1\"";
        let program = host
            .program("unshare")
            .args(["--mount", "sh", "-c", script])
            .arg(shunt_compat::find_program("sshd"))
            .arg(config)
            .start("sshd");
        host.wait_for_port(port);
        Server { _program: program, port }
    }

    /// Returns the common options of the clients, which differ in the name of the option for the
    /// port.
    fn options(&self, host: &Host, port: &str) -> Vec<String> {
        let here = host.dir().display();
        let mut options =
            vec![format!("-F/dev/null"), format!("-i{here}/key"), format!("{port}{}", self.port)];
        let settings = [
            String::from("BatchMode=yes"),
            String::from("StrictHostKeyChecking=no"),
            format!("UserKnownHostsFile={here}/known_hosts"),
            String::from("LogLevel=ERROR"),
        ];
        options.extend(settings.map(|setting| format!("-o{setting}")));
        options
    }
}

/// Returns bytes that do not repeat.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn large_file(host: &Host) -> (PathBuf, Vec<u8>) {
    let content = noise(FILE);
    (host.write("large", &content), content)
}

/// Expects shared memory for the transfer's bytes, but not for those before and between the forks
/// of a session.
fn expect_shm(transport: &TransportWatch, port: u16) {
    transport.expect(Expected { port, connections: 1, share: 0.3 });
}

#[test]
fn a_command_answers_line_by_line() {
    both(Duration::from_secs(120), |host| {
        let server = Server::start(host);
        let lines: String =
            (0..20_000).map(|line| format!("line {line} x{}\n", "y".repeat(line % 90))).collect();
        let input = host.write("lines", &lines);
        let transport = host.watch_transport();
        let script = "while read -r line; do echo \"got $line\"; done; echo over >&2; exit 7";
        let client = host
            .program("ssh")
            .args(server.options(host, "-p"))
            .args(["root@127.0.0.1", script])
            .input(input)
            .start("ssh");
        let ended = client.wait(LIMIT);
        let expected: String = lines.lines().map(|line| format!("got {line}\n")).collect();
        assert!(ended.stdout == expected, "{}", ended.stderr);
        if transport.is_watched() {
            assert!(transport.on_shm(server.port) > 0, "{}", transport.report(server.port));
        }
        (ended.status.code(), ended.stderr)
    });
}

#[test]
fn scp_copies_both_ways() {
    both(Duration::from_secs(120), |host| {
        let server = Server::start(host);
        let (large, content) = large_file(host);
        let transport = host.watch_transport();
        let there = host.path("there");
        let back = host.path("back");
        let remote = format!("root@127.0.0.1:{}", there.display());
        let scp = || host.program("scp").args(server.options(host, "-P"));
        scp().arg(&large).arg(&remote).run("scp", LIMIT);
        scp().arg(&remote).arg(&back).run("scp", LIMIT);
        assert!(fs::read(there).ok().as_ref() == Some(&content), "what scp has sent");
        assert!(fs::read(back).ok().as_ref() == Some(&content), "what scp has fetched");
        expect_shm(&transport, server.port);
    });
}

#[test]
fn sftp_copies_both_ways() {
    both(Duration::from_secs(120), |host| {
        let server = Server::start(host);
        let (large, content) = large_file(host);
        let (there, back) = (host.path("there"), host.path("back"));
        let batch = format!("put {} {}\nget {1} {}\n", large.display(), there.display(), back.display());
        let batch = host.write("batch", batch);
        let transport = host.watch_transport();
        host.program("sftp")
            .args(server.options(host, "-P"))
            .arg("-b")
            .arg(batch)
            .arg("root@127.0.0.1")
            .run("sftp", LIMIT);
        assert!(fs::read(there).ok().as_ref() == Some(&content), "what sftp has sent");
        assert!(fs::read(back).ok().as_ref() == Some(&content), "what sftp has fetched");
        expect_shm(&transport, server.port);
    });
}

#[test]
fn a_forwarded_port() {
    both(Duration::from_secs(120), |host| {
        let server = Server::start(host);
        let (_, content) = large_file(host);
        let (web, forwarded) = (host.port(), host.port());
        let _web = host
            .program("python3")
            .args(["-m", "http.server", "--bind", "127.0.0.1", "--directory"])
            .arg(host.dir())
            .arg(web.to_string())
            .start("web");
        host.wait_for_port(web);
        let transport = host.watch_transport();
        let _tunnel = host
            .program("ssh")
            .args(server.options(host, "-p"))
            .args(["-N", "-L", &format!("127.0.0.1:{forwarded}:127.0.0.1:{web}"), "root@127.0.0.1"])
            .start("ssh");
        host.wait_for_port(forwarded);
        let fetched = host.path("fetched");
        for _ in 0..2 {
            host.program("curl")
                .args(["--silent", "--show-error", "--fail", "--output"])
                .arg(&fetched)
                .arg(format!("http://127.0.0.1:{forwarded}/large"))
                .run("curl", LIMIT);
            assert!(fs::read(&fetched).ok().as_ref() == Some(&content), "what came through the tunnel");
        }
        expect_shm(&transport, server.port);
    });
}

/// The process that has logged the user in keeps the connection, in addition to the one that serves
/// the user.
#[test]
fn another_user_than_root_stays_on_tcp() {
    both(Duration::from_secs(120), |host| {
        let server = Server::start(host);
        let lines: String =
            (0..20_000).map(|line| format!("line {line} {}\n", "x".repeat(line % 90))).collect();
        let transport = host.watch_transport();
        let ended = host
            .program("ssh")
            .args(server.options(host, "-p"))
            // Long enough for the status to be read.
            .args([&format!("{OTHER}@127.0.0.1"), "id -un; cat; sleep 1"])
            .input(host.write("lines", &lines))
            .run("ssh", LIMIT);
        assert!(ended.stdout == format!("{OTHER}\n{lines}"), "{}", ended.stderr);
        let report = transport.report(server.port);
        // After the fork the connection is considered again if there are enough sends. The reason
        // is then that it is shared.
        let named = [Reason::Shared, Reason::Fork]
            .iter()
            .any(|reason| report.contains(&format!("sshd: send on TCP because {}", reason.label())));
        let considered = report.contains("sshd: send on TCP because");
        assert!(named || !considered || !transport.is_watched(), "{report}");
        assert_eq!(transport.on_shm(server.port), 0, "{report}");
    });
}
