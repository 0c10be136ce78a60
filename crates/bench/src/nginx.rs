//! Configures nginx and wrk, and parses wrk's output.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::worker::Measured;

/// The small file to fetch: its name and its size in bytes.
pub(crate) const SMALL: (&str, usize) = ("small", 1 << 10);
/// The large file to fetch.
pub(crate) const LARGE: (&str, usize) = ("large", 1 << 20);

/// Writes both files to a directory, which is created.
pub(crate) fn write_files(root: &Path) -> Result<()> {
    std::fs::create_dir_all(root)?;
    for (name, size) in [SMALL, LARGE] {
        std::fs::write(root.join(name), vec![b'x'; size])?;
    }
    Ok(())
}

/// Writes a configuration with one worker to a directory, and returns nginx's arguments. `http` is
/// the configuration of the server.
pub(crate) fn configure(directory: &Path, http: &str) -> Result<[OsString; 4]> {
    let own = directory.display();
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {own}/{name}; "))
        .concat();
    let configuration = format!(
        "{user} daemon off; worker_processes 1; pid {own}/pid; error_log {own}/error.log warn;
         events {{ worker_connections 512; }}
         http {{ access_log off; keepalive_requests 100000000; sendfile on; {paths} {http} }}"
    );
    let file = directory.join("nginx.conf");
    std::fs::write(&file, configuration).context("nginx.conf")?;
    Ok(["-e".into(), directory.join("error.log").into(), "-c".into(), file.into()])
}

/// Returns wrk's arguments. The time is rounded up to whole seconds, which wrk requires.
pub(crate) fn wrk(connections: u32, time: Duration, url: &str) -> [String; 8] {
    let whole = time.as_secs_f64().ceil() as u64;
    let [connections, time] = [connections.to_string(), format!("{whole}s")];
    ["-t", "1", "-c", &connections, "--latency", "-d", &time, url].map(str::to_owned)
}

/// Parses wrk's output. Returns `None` if a request failed or there were none.
pub(crate) fn measured(output: &str) -> Option<Measured> {
    if output.contains("Non-2xx") || output.contains("Socket errors") {
        return None;
    }
    let word_after = |label: &str| {
        output.lines().find_map(|line| line.trim().strip_prefix(label)?.split_whitespace().next())
    };
    let rate: f64 = word_after("Requests/sec:")?.parse().ok()?;
    let operations: u64 =
        output.lines().find_map(|line| line.split_once(" requests in ")?.0.trim().parse().ok())?;
    (operations > 0).then_some(())?;
    Some(Measured {
        operations,
        seconds: operations as f64 / rate,
        p50_us: microseconds(word_after("50%")?)?,
        p99_us: microseconds(word_after("99%")?)?,
    })
}

/// Parses a time with its unit.
fn microseconds(text: &str) -> Option<f64> {
    [("us", 1.0), ("ms", 1e3), ("s", 1e6)].iter().find_map(|(unit, factor)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(number * factor)
    })
}
