//! PHP-FPM behind Apache's event MPM, by FastCGI connections that are kept and used again.
//!
//! A child of PHP-FPM serves one connection until that ends. Apache's processes each keep as many
//! connections as they have once needed. If there are more connections than children, the others
//! wait in the listener's queue without an answer, natively too. So Apache is configured with the
//! number of children.

use shunt_compat::{Expected, Host, Program, both, end_on_transport};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const CHILDREN: usize = 8;
const CLIENTS: usize = 16;

const PAGE: &str = r#"<?php
$body = file_get_contents("php://input");
echo $_SERVER["REQUEST_METHOD"], " ", $_SERVER["QUERY_STRING"], " ", strlen($body), " ", md5($body), "\n";
echo str_repeat("line\n", strlen($body) % 7000);
"#;

/// Returns the path of Debian's PHP-FPM, whose name contains the version.
fn fpm_program() -> String {
    let programs = fs::read_dir("/usr/sbin").into_iter().flatten().flatten().map(|entry| entry.path());
    let is_fpm =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("php-fpm"));
    let found = programs.filter(is_fpm).max();
    found.expect("php-fpm is not installed: run `make test`, which sets it up").to_string_lossy().into_owned()
}

fn fpm(host: &Host, port: u16) -> Program {
    let here = host.dir().display();
    let config = host.write(
        "fpm.conf",
        format!(
            "[global]\nerror_log = {here}/fpm.stderr\ndaemonize = no\n[www]\nuser = nobody\ngroup = nogroup\n\
             listen = 127.0.0.1:{port}\npm = static\npm.max_children = {CHILDREN}\n"
        ),
    );
    let server = host.program(fpm_program()).args(["-n", "-F", "-R", "-y"]).arg(config).start("php-fpm");
    host.wait_for_port(port);
    server
}

fn apache(host: &Host, port: u16, fpm: u16) -> Program {
    let here = host.dir().display();
    let modules: String = ["mpm_event", "authz_core", "proxy", "proxy_fcgi"]
        .iter()
        .map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"))
        .collect();
    let config = host.write(
        "apache.conf",
        format!(
            "ServerRoot {here}\nServerName localhost\nListen 127.0.0.1:{port}\nPidFile {here}/apache.pid\n\
             ErrorLog {here}/apache.stderr\nDefaultRuntimeDir {here}\nMutex file:{here}\nDocumentRoot {here}/www\n\
             {modules}User nobody\nGroup nogroup\nStartServers 1\nServerLimit 1\nThreadsPerChild 25\n\
             MaxRequestWorkers 25\nKeepAlive On\nMaxKeepAliveRequests 0\nKeepAliveTimeout 60\n\
             <Proxy \"fcgi://127.0.0.1:{fpm}/\" enablereuse=on max={CHILDREN}>\n</Proxy>\n\
             <Directory {here}/www>\nRequire all granted\n</Directory>\n\
             <FilesMatch \"\\.php$\">\nSetHandler \"proxy:fcgi://127.0.0.1:{fpm}/\"\n</FilesMatch>\n"
        ),
    );
    let server = host.program("apache2").arg("-f").arg(config).args(["-D", "FOREGROUND"]).start("apache");
    host.wait_for_port(port);
    server
}

#[test]
fn every_request_is_answered_by_connections_that_are_used_again() {
    both(Duration::from_secs(100), |host| {
        fs::create_dir(host.path("www")).expect("own directory");
        host.write("www/page.php", PAGE);
        let (port, behind) = (host.port(), host.port());
        let behind_program = fpm(host, behind);
        let server = apache(host, port, behind);
        let transport = host.watch_transport();
        let asking = host
            .script("python3", "pages.py")
            .args([&port.to_string(), "/page.php", &CLIENTS.to_string(), "40", "gate"])
            .start("pages");
        let both_hops = [
            Expected { port, connections: CLIENTS, share: 0.8 },
            Expected { port: behind, connections: CHILDREN, share: 0.8 },
        ];
        let printed = end_on_transport(host, &transport, (asking, "gate"), &both_hops);
        drop(server);
        drop(behind_program);
        printed
    });
}

/// PHP loads extensions with RTLD_DEEPBIND, so an extension and libcurl are bound past libraries
/// that were loaded before.
#[test]
fn pages_are_fetched_by_an_extension() {
    both(Duration::from_secs(100), |host| {
        let port = host.port();
        let server = host.script("node", "page_node.js").arg(port.to_string()).start("server");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let client = host
            .script("php", "fetch.php")
            .args([port.to_string(), "400".into(), "gate".into()])
            .start("client");
        let printed = end_on_transport(
            host,
            &transport,
            (client, "gate"),
            &[Expected { port, connections: 1, share: 0.8 }],
        );
        drop(server);
        printed
    });
}
