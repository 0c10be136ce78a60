//! A page for Prometheus, and no other.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// Answers everybody who asks with what `text` gives.
pub async fn serve(text: impl Fn() -> String, listener: TcpListener) {
    let mut asking = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if asking.len() < MOST => match accepted {
                Ok((stream, _)) => asking.push(timeout(LIMIT, answer(&text, stream))),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            },
            Some(_) = asking.next() => {}
        }
    }
}

/// The buckets of how long it takes to set a connection up, in seconds.
pub const SET_UP_BUCKETS: [f64; 14] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5];

/// Everybody on the host may ask where it is not for root alone: nobody can take more descriptors than these, nor longer than this.
const MOST: usize = 32;
const LIMIT: Duration = Duration::from_secs(3);
/// A request's head is shorter.
const HEAD: usize = 8192;
const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

async fn answer(text: impl Fn() -> String, mut stream: TcpStream) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD {
        if stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let (status, body) = match head.starts_with(b"GET /metrics ") {
        true => ("200 OK", text()),
        false => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
    };
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}
