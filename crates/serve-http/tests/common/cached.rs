//! A proxy with a cache, and a backend whose replies the requests choose.

use std::io::{BufReader, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, SystemTime};

use super::{Lab, PROXY, Reply, read_reply};

/// The file of a proxy whose backend is at 9001, with a cache.
pub(crate) fn cached(more: &str) -> String {
    format!(
        "[health]\ninterval = 3600.0\n[[pool]]\nname = 'app'\n[[pool.backend]]\naddress = '127.0.0.1:9001'\n\
         [[route]]\npool = 'app'\ncache = {{ {more} }}\n"
    )
}

/// Sends a request on a new connection, and returns the reply.
pub(crate) fn ask(lab: &Lab, to: SocketAddr, method: &str, path: &str, fields: &str) -> Reply {
    let mut stream = lab.connect_to(to);
    let request = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{fields}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    read_reply(&mut BufReader::new(stream), method == "HEAD").expect("a reply")
}

pub(crate) fn get(lab: &Lab, path: &str, fields: &str) -> Reply {
    ask(lab, PROXY, "GET", path, fields)
}

/// A date of HTTP that is so many seconds from now.
pub(crate) fn date(seconds: i64) -> String {
    let now = SystemTime::now();
    let shift = Duration::from_secs(seconds.unsigned_abs());
    httpdate::fmt_http_date(if seconds < 0 { now - shift } else { now + shift })
}

/// A backend that answers with the fields that the request's X-Reply has, `|` for the line's end, and
/// with a body of the path and the number of its requests. Its status is that of X-Status.
pub(crate) fn backend(lab: &Lab) -> super::Requests {
    let count = AtomicU64::new(0);
    lab.replying(9001, move |request| {
        let number = count.fetch_add(1, SeqCst) + 1;
        let path = request.line.split(' ').nth(1).unwrap();
        let body = if request.line.starts_with("HEAD") { String::new() } else { format!("{path} {number}") };
        let status = request.field("x-status").unwrap_or("200");
        let fields = request.field("x-reply").unwrap_or_default().replace('|', "\r\n");
        let fields = if fields.is_empty() { fields } else { fields + "\r\n" };
        format!("HTTP/1.1 {status} OK\r\nContent-Length: {}\r\n{fields}\r\n{body}", body.len()).into_bytes()
    })
}
