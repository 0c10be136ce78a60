//! The servers that `proxy` and `static` compare.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use serde::Serialize;

use super::way::{ADDRESS, Stage, Way};
use crate::nginx::configure;

/// The port of the backend.
pub(super) const BACKEND: u16 = 6000;
/// The file with the backend's reply.
pub(super) const REPLY: &str = "reply";

/// A server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Side {
    Nginx,
    /// The same once more.
    NginxAgain,
    Haproxy,
    /// A program that only forwards bytes.
    FloorForwarder,
    Shunt,
    NginxFile,
    NginxFileAgain,
    NginxCache,
    /// A program that sends the reply of nginx, whatever it receives.
    FloorServer,
    ShuntCache,
}

impl Side {
    pub(super) fn label(self) -> &'static str {
        match self {
            Side::Nginx => "nginx",
            Side::Haproxy => "HAProxy",
            Side::Shunt => "shunt",
            Side::NginxFile => "nginx, file",
            Side::NginxCache => "nginx, cache",
            Side::ShuntCache => "shunt, cache",
            Side::NginxAgain => "nginx, again",
            Side::NginxFileAgain => "nginx, file, again",
            Side::FloorForwarder | Side::FloorServer => "floor",
        }
    }

    /// Returns the command that starts it at [`ADDRESS`].
    pub(super) fn command(self, stage: &Stage) -> Result<Command> {
        let directory = stage.path(&self.label().replace(", ", "-"));
        std::fs::create_dir_all(&directory)?;
        match self {
            Side::Nginx | Side::NginxAgain => {
                // Bodies stay in memory, as with the others.
                let http = format!(
                    "upstream backend {{ server 127.0.0.1:{BACKEND}; keepalive 64; keepalive_requests 100000000; }}
                     server {{ listen {ADDRESS} backlog=4096; location / {{ proxy_pass http://backend;
                     proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_set_header Host $http_host;
                     proxy_set_header X-Forwarded-For $remote_addr; proxy_max_temp_file_size 0;
                     proxy_buffers 16 64k; proxy_buffer_size 64k; proxy_busy_buffers_size 128k; }} }}"
                );
                nginx(stage, &directory, &http)
            }
            Side::Haproxy => {
                let file = directory.join("haproxy.cfg");
                let text = format!(
                    "global\n nbthread 1\n maxconn 4096\ndefaults\n mode http\n timeout client 60s\n timeout server 60s\n \
                     timeout connect 5s\n option splice-auto\n option forwardfor\n http-reuse always\nfrontend clients\n \
                     bind {ADDRESS}\n default_backend files\nbackend files\n server one 127.0.0.1:{BACKEND}\n"
                );
                std::fs::write(&file, text)?;
                let mut command = stage.namespace.command("haproxy");
                command.args(["-db", "-f"]).arg(file);
                Ok(command)
            }
            Side::FloorForwarder => {
                let mut command = stage.namespace.command(stage.path("epoll_forwarder"));
                command.args([ADDRESS.port(), BACKEND].map(|port| port.to_string()));
                Ok(command)
            }
            Side::FloorServer => {
                let mut command = stage.namespace.command(stage.path("epoll_constant"));
                command.arg(ADDRESS.port().to_string()).arg(stage.path(REPLY));
                Ok(command)
            }
            Side::NginxFile | Side::NginxFileAgain => {
                let http = format!(
                    "open_file_cache max=10; server {{ listen {ADDRESS} backlog=4096; root {}; }}",
                    stage.path("backend").display()
                );
                nginx(stage, &directory, &http)
            }
            Side::NginxCache => {
                let http = format!(
                    "proxy_cache_path {}/cache keys_zone=zone:1m; open_file_cache max=10; proxy_cache zone;
                     proxy_cache_valid 200 1h; server {{ listen {ADDRESS} backlog=4096;
                     location / {{ proxy_pass http://127.0.0.1:{BACKEND}; }} }}",
                    directory.display()
                );
                nginx(stage, &directory, &http)
            }
            Side::Shunt | Side::ShuntCache => {
                let file = directory.join("proxy.toml");
                let cache = match self {
                    Side::ShuntCache => "[[route]]\npool = 'default'\ncache = { lifetime = 3600.0 }\n",
                    _ => "",
                };
                let text = format!(
                    "[health]\ninterval = 3600.0\n[[backend]]\naddress = '127.0.0.1:{BACKEND}'\n{cache}"
                );
                std::fs::write(&file, text)?;
                let mut command = stage.serve(Way::Auto, "builtin:http-proxy")?;
                command.arg("--backends").arg(file);
                Ok(command)
            }
        }
    }
}

/// Returns the command that starts nginx. `http` is the configuration of the server.
pub(super) fn nginx(stage: &Stage, directory: &Path, http: &str) -> Result<Command> {
    let mut command = stage.namespace.command("nginx");
    command.args(configure(directory, http)?);
    Ok(command)
}
