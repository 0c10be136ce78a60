//! Subversion: files are committed to svnserve and exported again, by one client after the other
//! and by several simultaneously. The server forks for each connection, or has threads.

use shunt_compat::{Expected, Host, both};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);

/// Returns `true` if two directories of the host have the same files.
fn are_same(host: &Host, one: &str, other: &str) -> bool {
    let compared =
        Command::new("diff").args(["-r", "-x", ".svn"]).args([host.path(one), host.path(other)]).output();
    compared.expect("diff runs").status.success()
}

fn serve(how: &'static str) {
    both(2 * LIMIT, move |host| {
        let port = host.port();
        host.program("svnadmin").arg("create").arg(host.path("files")).run("svnadmin", LIMIT);
        host.write("files/conf/svnserve.conf", "[general]\nanon-access = write\n");
        let server = host
            .program("svnserve")
            .words(&format!(
                "{how} --daemon --foreground --listen-host 127.0.0.1 --listen-port {port} --root"
            ))
            .arg(host.dir())
            .start("svnserve");
        host.wait_for_port(port);
        let url = format!("svn://127.0.0.1:{port}/files");
        let svn = |command: &str| host.program("svn").words(&format!("{command} --non-interactive"));
        let transport = host.watch_transport();
        svn("checkout").arg(&url).arg(host.path("work")).run("checkout", LIMIT);
        for revision in 1..=2 {
            for file in 0..60 {
                let line = |number| format!("line {number} of file {file}, {revision}\n");
                host.write(&format!("work/{file}"), (0..file * 100).map(line).collect::<String>());
            }
            svn("add --force --quiet").arg(host.path("work")).run("add", LIMIT);
            svn("commit --quiet --message revision").arg(host.path("work")).run("commit", LIMIT);
        }
        let exports = ["one", "two", "three", "four"]
            .map(|name| (name, svn("export --quiet").arg(&url).arg(host.path(name)).start(name)));
        for (name, export) in exports {
            assert!(export.wait(LIMIT).success(), "{}", host.logs());
            assert!(are_same(host, "work", name), "what {name} has");
        }
        let log = svn("log --quiet --revision 1:2").arg(&url).run("log", LIMIT).stdout;
        assert_eq!(log.matches("(no author)").count(), 2, "{log}");
        transport.expect(Expected { port, connections: 4, share: 0.5 });
        drop(server);
    });
}

#[test]
fn with_processes() {
    serve("");
}

#[test]
fn with_threads() {
    serve("--threads");
}
