//! Runs nginx in the server's container, with files of the test.

use std::fs;
use std::path::PathBuf;

use super::lab::{B, Lab, await_until};

/// The parts of nginx's configuration that differ between tests.
pub(crate) struct Site<'s> {
    pub(crate) workers: u32,
    /// Directives of the block `http`: the format of the log.
    pub(crate) http: &'s str,
    /// Directives of the block `server`: the listening socket, at port 80, and others.
    pub(crate) server: &'s str,
    /// The number of listening sockets.
    pub(crate) sockets: usize,
}

/// Returns the directory of nginx's files. If `http` configures a log, it is `access.log` in there.
pub(crate) fn directory(lab: &Lab) -> PathBuf {
    lab.path("nginx")
}

/// Starts nginx with these files, and waits until it listens.
pub(crate) fn serve(lab: &mut Lab, is_supervised: bool, site: &Site<'_>, files: &[(String, Vec<u8>)]) {
    let directory = directory(lab);
    fs::create_dir_all(directory.join("html")).unwrap();
    for (name, content) in files {
        fs::write(directory.join("html").join(name), content).unwrap();
    }
    let d = directory.display();
    let Site { workers, http, server, sockets } = site;
    let config = format!(
        "daemon off; worker_processes {workers}; pid {d}/pid; error_log {d}/error.log; events {{}}\n\
         http {{ {http} client_body_temp_path {d}/1; proxy_temp_path {d}/2; fastcgi_temp_path {d}/3;\n\
         uwsgi_temp_path {d}/4; scgi_temp_path {d}/5; default_type text/plain;\n\
         server {{ {server} root {d}/html; }} }}\n"
    );
    let path = lab.path("nginx.conf");
    fs::write(&path, config).unwrap();
    let mut nginx = lab.command(B, is_supervised, "nginx");
    let launched = lab.launch(B, nginx.arg("-c").arg(path).arg("-p").arg(&directory), "");
    let complaint = || {
        let log = fs::read_to_string(directory.join("error.log"));
        format!("{} {}", lab.said(launched), log.unwrap_or_default())
    };
    await_until(|| lab.listening(B, 80) == *sockets, complaint);
}
