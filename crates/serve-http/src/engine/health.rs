//! Active health checks: a connection to each backend, or a GET.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::backends::{Backend, Health};
use super::shared::Shared;
use crate::config::duration;

/// The period at which it is determined which checks are due.
const STEP: Duration = Duration::from_millis(20);

/// Checks all backends, each once per interval of its pool.
pub(crate) async fn look_after(shared: &Shared) {
    let mut due: HashMap<usize, Instant> = HashMap::new();
    loop {
        let (now, config) = (Instant::now(), shared.current().config);
        due.retain(|id, _| config.backends().any(|(_, backend)| backend.id == *id));
        let mut pause = Duration::from_secs(1);
        for (pool, backend) in config.backends() {
            let interval = duration(pool.health.interval);
            let next = due.entry(backend.id).or_insert(now);
            if *next <= now {
                *next = now + interval;
                tokio::spawn(check(pool.health.clone(), backend.clone()));
            }
            pause = pause.min(*next - now);
        }
        sleep(pause.max(STEP)).await;
    }
}

async fn check(health: Health, backend: Arc<Backend>) {
    match timeout(duration(health.timeout), probe(&health, &backend)).await {
        Ok(Ok(())) => backend.works(),
        Ok(Err(why)) => backend.fails(&why),
        Err(_) => backend.fails("no answer in time"),
    }
}

async fn probe(health: &Health, backend: &Backend) -> Result<(), String> {
    let mut stream = TcpStream::connect(backend.address).await.map_err(|error| error.to_string())?;
    let Some(path) = &health.path else { return Ok(()) };
    let host = health.host.clone().unwrap_or_else(|| backend.address.to_string());
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: shunt-health\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
    let mut line = Vec::new();
    while !line.contains(&b'\n') && line.len() < 256 {
        if stream.read_buf(&mut line).await.map_err(|error| error.to_string())? == 0 {
            break;
        }
    }
    // HTTP/1.1 200 OK
    let status = line.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5));
    match status {
        Some([b'1'..=b'3', _, _]) => Ok(()),
        Some(status) => Err(format!("status {}", status.escape_ascii())),
        None => Err("no reply of HTTP/1".to_owned()),
    }
}
