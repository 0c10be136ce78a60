//! nginx with wrk: files of 1 KB and 1 MB, and a proxy with persistent connections to the upstream.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::super::point::Point;
use super::{Address, Program, Served};
use crate::find;
use crate::nginx;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::Measured;

pub(super) fn points() -> Vec<Point> {
    // wrk does not support Unix sockets.
    const SIDES: &[Side] = &[Side::Tcp, Side::ShuntSleep, Side::Shunt];
    let point = |label, load| Point::new(label, SIDES, Served::new(load, Placement::TwoCores));
    vec![
        point("1 KB, 50 connections", Nginx { file: "small", connections: 50, proxy: false }),
        point("1 MB, 10 connections", LARGE),
        point(
            "as a keep-alive proxy, 1 KB, 50 connections",
            Nginx { file: "small", connections: 50, proxy: true },
        ),
    ]
}

/// nginx, from which wrk fetches a file.
pub(super) struct Nginx {
    file: &'static str,
    connections: u32,
    proxy: bool,
}

/// Files of 1 MiB over 10 connections.
pub(super) const LARGE: Nginx = Nginx { file: nginx::LARGE.0, connections: 10, proxy: false };

impl Program for Nginx {
    fn needs(&self) -> &[&str] {
        &["nginx", "wrk"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let root = stage.path("www");
        nginx::write_files(&root)?;
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
        // The upstream shares the client's processor on all sides.
        Ok(vec![
            serve(stage, side, Role::Server, address.port, &proxy)?,
            serve(stage, side, Role::Client, upstream, &site)?,
        ])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        let program = find::installed("wrk")?;
        let mut command = stage.command(&program, side, Role::Client, address.placement)?;
        let url = format!("http://127.0.0.1:{}/{}", address.port, self.file);
        command.args(nginx::wrk(self.connections, seconds, &url));
        Ok(command)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        nginx::measured(output)
    }
}

/// Starts an nginx with this configuration of a server.
pub(super) fn serve(stage: &Stage, side: Side, role: Role, port: u16, http: &str) -> Result<Process> {
    let directory = stage.path(&format!("nginx-{port}"));
    std::fs::create_dir(&directory)?;
    let http = http.replace("PORT", &port.to_string());
    let arguments = nginx::configure(&directory, &http)?;
    let mut command = stage.command(&find::installed("nginx")?, side, role, Placement::TwoCores)?;
    Process::spawn(command.args(arguments), "nginx")
}
