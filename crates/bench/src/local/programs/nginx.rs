//! nginx with wrk: files of 1 KB and 1 MB, and a proxy that keeps its connections to the upstream.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::point::Point;
use super::{Address, Program, Served, find};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::Measured;

pub(super) fn points() -> Vec<Point> {
    // wrk knows no Unix sockets.
    const SIDES: &[Side] = &[Side::Tcp, Side::ShuntSleep, Side::Shunt];
    let point = |label, load| Point::new(label, SIDES, Served::new(load, Placement::TwoCores));
    vec![
        point("1 KB, 50 connections", Nginx { file: "small", connections: 50, proxy: false }),
        point("1 MB, 10 connections", Nginx { file: "large", connections: 10, proxy: false }),
        point(
            "as a keep-alive proxy, 1 KB, 50 connections",
            Nginx { file: "small", connections: 50, proxy: true },
        ),
    ]
}

struct Nginx {
    file: &'static str,
    connections: u32,
    proxy: bool,
}

const FILES: [(&str, usize); 2] = [("small", 1 << 10), ("large", 1 << 20)];

impl Program for Nginx {
    fn needs(&self) -> &[&str] {
        &["nginx", "wrk"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let root = stage.path("www");
        std::fs::create_dir_all(&root)?;
        for (name, size) in FILES {
            std::fs::write(root.join(name), vec![b'x'; size])?;
        }
        let site = format!("server {{ listen 127.0.0.1:PORT; root {}; }}", root.display());
        if !self.proxy {
            return Ok(vec![serve(stage, side, Role::Server, address.port, &site)?]);
        }
        let upstream = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let proxy = format!(
            "upstream files {{ server 127.0.0.1:{upstream}; keepalive 64; }}
             server {{ listen 127.0.0.1:PORT; location / {{
                 proxy_pass http://files; proxy_http_version 1.1; proxy_set_header Connection \"\"; }} }}"
        );
        // The upstream shares the client's processor, in all sides alike.
        Ok(vec![
            serve(stage, side, Role::Server, address.port, &proxy)?,
            serve(stage, side, Role::Client, upstream, &site)?,
        ])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        let program = find::installed("wrk")?;
        let mut command = stage.command(&program, side, Role::Client, address.placement)?;
        let whole = seconds.as_secs_f64().ceil() as u64;
        command.args([
            "-t",
            "1",
            "-c",
            &self.connections.to_string(),
            "--latency",
            "-d",
            &format!("{whole}s"),
        ]);
        command.arg(format!("http://127.0.0.1:{}/{}", address.port, self.file));
        Ok(command)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        if output.contains("Non-2xx") || output.contains("Socket errors") {
            return None;
        }
        let word_after = |label: &str| {
            output.lines().find_map(|line| line.trim().strip_prefix(label)?.split_whitespace().next())
        };
        let rate: f64 = word_after("Requests/sec:")?.parse().ok()?;
        let operations: u64 =
            output.lines().find_map(|line| line.split_once(" requests in ")?.0.trim().parse().ok())?;
        Some(Measured {
            operations,
            seconds: operations as f64 / rate,
            p50_us: microseconds(word_after("50%")?)?,
            p99_us: microseconds(word_after("99%")?)?,
        })
    }
}

fn serve(stage: &Stage, side: Side, role: Role, port: u16, http: &str) -> Result<Process> {
    let directory = stage.path(&format!("nginx-{port}"));
    std::fs::create_dir(&directory)?;
    let own = directory.display();
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {own}/{name}; "))
        .concat();
    let configuration = format!(
        "{user} daemon off; worker_processes 1; pid {own}/pid; error_log {own}/error.log warn;
         events {{ worker_connections 512; }}
         http {{ access_log off; keepalive_requests 100000000; sendfile on; {paths} {} }}",
        http.replace("PORT", &port.to_string())
    );
    let file = directory.join("nginx.conf");
    std::fs::write(&file, configuration).context("nginx.conf")?;
    let mut command = stage.command(&find::installed("nginx")?, side, role, Placement::TwoCores)?;
    command.arg("-e").arg(directory.join("error.log")).arg("-c").arg(file);
    Process::spawn(&mut command, "nginx")
}

/// wrk's times carry their unit.
fn microseconds(text: &str) -> Option<f64> {
    [("us", 1.0), ("ms", 1e3), ("s", 1e6)].iter().find_map(|(unit, factor)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(number * factor)
    })
}
