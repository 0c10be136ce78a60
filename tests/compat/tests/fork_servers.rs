//! Servers with a process for each connection: Apache's prefork, Python's ForkingTCPServer, and a
//! program started as by inetd.

use shunt_abi::reason::Reason;
use shunt_compat::{Expected, Host, Program, both};
use std::fs;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);
const CONNECTIONS: usize = 8;

/// Starts Apache with exactly as many processes as connections.
fn apache(host: &Host, port: u16) -> Program {
    let here = host.dir().display();
    let modules = ["mpm_prefork", "authz_core", "reqtimeout"];
    let modules: String = modules
        .iter()
        .map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"))
        .collect();
    let config = format!(
        "ServerRoot {here}\nServerName localhost\nListen 127.0.0.1:{port}\nPidFile {here}/apache.pid\n\
         ErrorLog {here}/apache.stderr\nDefaultRuntimeDir {here}\nMutex file:{here}\nDocumentRoot {here}/www\n\
         {modules}User nobody\nGroup nogroup\nStartServers {CONNECTIONS}\nMinSpareServers 1\n\
         MaxRequestWorkers {count}\nKeepAlive On\nMaxKeepAliveRequests 0\nKeepAliveTimeout 60\n\
         <Directory {here}/www>\nRequire all granted\n</Directory>\n",
        count = CONNECTIONS + 2,
    );
    let config = host.write("apache.conf", config);
    let server = host.program("apache2").arg("-f").arg(config).args(["-D", "FOREGROUND"]).start("apache");
    host.wait_for_port(port);
    server
}

#[test]
fn apache_with_a_process_for_each_connection() {
    both(Duration::from_secs(100), |host| {
        fs::create_dir(host.path("www")).expect("own directory");
        let content: String = (0..9000).map(|line| format!("line {line}\n")).collect();
        fs::write(host.path("www/file"), &content).expect("own directory");
        let port = host.port();
        let _server = apache(host, port);
        let transport = host.watch_transport();
        let url = format!("http://127.0.0.1:{port}/file");
        let run = host.program("wrk").words(&format!("-t 1 -c {CONNECTIONS} -d 3s {url}")).run("wrk", LIMIT);
        assert!(!run.stdout.contains("Socket errors") && !run.stdout.contains("Non-2xx"), "{}", run.stdout);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.8 });
        // Fetch the same file ten times over one connection.
        let answer = host.path("answer");
        let curl = host.program("curl").args(["--silent", "--show-error", "--fail"]);
        let urls = (0..10).flat_map(|_| [url.clone(), "--output".into(), answer.display().to_string()]);
        curl.args(urls).run("curl", LIMIT);
        assert!(fs::read_to_string(answer).expect("curl has written it") == content);
    });
}

/// Lines are sent to the server and come back. Each connection belongs to a separate process.
#[test]
fn a_forking_server_of_pythons() {
    both(Duration::from_secs(100), |host| {
        let port = host.port();
        let mut server = host.script("python3", "forking.py").arg(port.to_string()).start("server");
        server.wait_for_output("ready", LIMIT);
        let transport = host.watch_transport();
        let client = host
            .script("python3", "forking.py")
            .args([&port.to_string(), &CONNECTIONS.to_string(), "3000"])
            .run("client", LIMIT);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.8 });
        client.stdout
    });
}

/// A program that is started for a connection, and has it as standard input and output. Such a
/// connection stays on TCP.
#[test]
fn a_program_that_inetd_starts() {
    both(Duration::from_secs(100), |host| {
        let port = host.port();
        let address = format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork");
        let _server = host.program("socat").args([&address, "EXEC:/bin/cat,nofork"]).start("socat");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let client =
            host.script("python3", "forking.py").args([&port.to_string(), "4", "2000"]).run("client", LIMIT);
        let report = transport.report(port);
        assert_eq!(transport.on_shm(port), 0, "{report}");
        let named = report.contains(&format!("because {}", Reason::Stdio.label()));
        assert!(named || !transport.is_watched(), "{report}");
        client.stdout
    });
}
