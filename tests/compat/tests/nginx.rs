//! nginx with wrk, as a static server and as a proxy for an upstream with keep-alive. curl verifies
//! the content.

use shunt_compat::{Expected, Host, Mode, Program, both};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

const CONNECTIONS: usize = 40;

/// Starts nginx with these directives in its `http` section.
fn nginx(host: &Host, name: &str, workers: usize, http: &str, port: u16) -> Program {
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    nginx_as(host, user, name, workers, http, port)
}

/// Starts nginx with a directive that sets the workers' user.
fn nginx_as(host: &Host, user: &str, name: &str, workers: usize, http: &str, port: u16) -> Program {
    let dir = host.path(name);
    fs::create_dir(&dir).expect("own directory");
    let dir = dir.display();
    let config = format!(
        "{user} daemon off; worker_processes {workers}; pid {dir}/pid; error_log {dir}/error.log warn;
         events {{ worker_connections 512; }}
         http {{
             access_log off; keepalive_requests 10000000; default_type application/octet-stream;
             client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;
             uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
             {http}
         }}"
    );
    let config = host.write(&format!("{name}.conf"), config);
    let server =
        host.program("nginx").arg("-e").arg(format!("{dir}/error.log")).arg("-c").arg(config).start(name);
    host.wait_for_port(port);
    server
}

/// Writes files of 1 KB and 1 MB to a directory of the host.
fn files(host: &Host) -> String {
    let root = host.path("www");
    fs::create_dir(&root).expect("own directory");
    for (name, size) in [("small", 1024u64), ("large", 1 << 20)] {
        let mut state = size;
        let content: Vec<u8> = (0..size)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        fs::write(root.join(name), content).expect("own directory");
    }
    root.display().to_string()
}

/// Fetches `name` ten times over one connection, and compares it each time.
fn fetch(host: &Host, port: u16, name: &str) {
    let url = format!("http://127.0.0.1:{port}/{name}");
    let (file, answer) = (host.path(&format!("www/{name}")), host.path("answer"));
    let curl =
        host.program("curl").args(["--silent", "--show-error", "--fail", "--write-out", "%{num_connects} "]);
    let urls = (0..10).flat_map(|_| [url.clone(), String::from("--output"), answer.display().to_string()]);
    let run = curl.args(urls).run("curl", Duration::from_secs(20));
    assert_eq!(run.stdout.trim(), "1 0 0 0 0 0 0 0 0 0", "new connections per transfer");
    assert!(
        fs::read(&answer).ok() == fs::read(&file).ok(),
        "curl got something else than {}",
        file.display()
    );
}

/// Runs wrk. It must see no error and only status 200, and transfer as many bytes as the number of
/// requests times `size`.
fn wrk(host: &Host, port: u16, name: &str, size: f64, seconds: u32) {
    let run = host
        .program("wrk")
        .words(&format!("-t 1 -c {CONNECTIONS} -d {seconds}s -s"))
        .arg(host.write("report.lua", REPORT))
        .arg(format!("http://127.0.0.1:{port}/{name}"))
        .run("wrk", Duration::from_secs(30));
    let report = run.stdout.lines().last().unwrap_or_default().to_owned();
    let figures: Vec<f64> = report.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [requests, bytes, errors] = figures[..] else { panic!("wrk printed\n{}", run.stdout) };
    assert_eq!(errors, 0.0, "wrk: {}", run.stdout);
    assert!(requests >= 100.0, "wrk made {requests} requests only");
    // A request in progress at the end is counted in bytes but not in requests.
    let most = (requests + CONNECTIONS as f64) * (size + 1000.0);
    assert!(
        bytes >= requests * size && bytes <= most,
        "{requests} answers of {size} bytes, but {bytes} bytes"
    );
}

const REPORT: &str = r#"
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("%d %d %d\n", summary.requests, summary.bytes,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"#;

fn static_server(workers: usize, sendfile: &'static str) {
    both(Duration::from_secs(60), move |host| {
        let port = host.port();
        let root = files(host);
        let http = format!("sendfile {sendfile}; server {{ listen 127.0.0.1:{port}; root {root}; }}");
        let server = nginx(host, "nginx", workers, &http, port);
        for (name, size) in [("small", 1024.0), ("large", 1048576.0)] {
            fetch(host, port, name);
            let transport = host.watch_transport();
            wrk(host, port, name, size, 2);
            transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
        }
        drop(server);
    });
}

#[test]
fn one_worker_with_sendfile() {
    static_server(1, "on");
}

#[test]
fn one_worker_without_sendfile() {
    static_server(1, "off");
}

#[test]
fn two_workers_with_sendfile() {
    static_server(2, "on");
}

#[test]
fn two_workers_without_sendfile() {
    static_server(2, "off");
}

/// Uses the broker that `shunt run` starts for root. Workers of another user cannot connect to it.
#[test]
fn workers_of_another_user() {
    both(Duration::from_secs(60), |host| {
        if host.mode() == Mode::Shunt {
            fs::set_permissions(host.broker_socket(), Permissions::from_mode(0o600)).expect("own socket");
        }
        let port = host.port();
        let server = format!("server {{ listen 127.0.0.1:{port}; root {}; }}", files(host));
        let server = nginx_as(host, "user www-data;", "static", 2, &server, port);
        fetch(host, port, "small");
        let transport = host.watch_transport();
        wrk(host, port, "small", 1024.0, 2);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
        drop(server);
    });
}

#[test]
fn in_front_of_an_upstream_with_keep_alive() {
    both(Duration::from_secs(60), |host| {
        let (front, back) = (host.port(), host.port());
        let root = files(host);
        let upstream = format!("sendfile on; server {{ listen 127.0.0.1:{back}; root {root}; }}");
        let upstream = nginx(host, "upstream", 1, &upstream, back);
        let proxy = format!(
            "upstream back {{ server 127.0.0.1:{back}; keepalive 64; keepalive_requests 10000000; }}
             server {{
                 listen 127.0.0.1:{front};
                 location / {{
                     proxy_pass http://back; proxy_http_version 1.1; proxy_set_header Connection '';
                 }}
             }}"
        );
        let proxy = nginx(host, "proxy", 1, &proxy, front);
        for (name, size) in [("small", 1024.0), ("large", 1048576.0)] {
            fetch(host, front, name);
            let transport = host.watch_transport();
            wrk(host, front, name, size, 2);
            transport.expect(Expected { port: front, connections: CONNECTIONS, share: 0.9 });
            transport.expect(Expected { port: back, connections: CONNECTIONS / 2, share: 0.9 });
        }
        drop(proxy);
        drop(upstream);
    });
}
