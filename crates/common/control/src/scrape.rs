//! Serves the page for Prometheus, and no other.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::admission::{Gate, Pass, Shares};

/// Answers all requests with the result of `text`, which may be computed on another thread.
pub async fn serve(text: impl AsyncFn() -> String, listener: TcpListener) {
    let (gate, mut asking) = (Gate::new(SHARES), FuturesUnordered::new());
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    let (pass, _) = gate.enter(from.ip(), false);
                    asking.push(timeout(LIMIT, answer_or_go(&text, stream, pass)));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            },
            Some(_) = asking.next() => {}
        }
    }
}

/// The buckets of the histogram of set-up times, in seconds.
pub const SET_UP_BUCKETS: [f64; 14] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5];

/// Bounds for unauthenticated requests: the number of connections per host, per network and in
/// total, and the time for each.
const SHARES: Shares = Shares { host: 16, network: 24, all: 32, reserved: 0 };
const LIMIT: Duration = Duration::from_secs(3);
/// The largest length of a request's head, in bytes.
const HEAD: usize = 8192;
const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers a request, unless the connection is evicted in favour of a later one.
async fn answer_or_go(text: &impl AsyncFn() -> String, stream: TcpStream, pass: Pass) -> std::io::Result<()> {
    tokio::select! {
        answered = answer(text, stream) => answered,
        () = pass.evicted() => Ok(()),
    }
}

async fn answer(text: &impl AsyncFn() -> String, mut stream: TcpStream) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD {
        if stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let (status, body) = match head.starts_with(b"GET /metrics ") {
        true => ("200 OK", text().await),
        false => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
    };
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(address: std::net::SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn silent_callers_do_not_keep_others_from_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = async {
            let mut silent = Vec::new();
            for round in 0..10 {
                for _ in 0..2 * SHARES.all {
                    silent.push(TcpStream::connect(address).await.unwrap());
                }
                assert!(ask(address).await.ends_with("one 1\n"), "round {round}");
            }
        };
        tokio::select! {
            () = serve(async || "one 1\n".to_owned(), listener) => unreachable!("it ends never"),
            () = asked => {}
        }
    }
}
