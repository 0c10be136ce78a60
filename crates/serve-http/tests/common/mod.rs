//! A proxy in a network namespace, with backends that the tests write themselves. Needs root.

#![allow(dead_code, reason = "no test needs all of it")]

pub(crate) mod cached;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use shunt_netns::Net;
use shunt_serve::engine::{Request as Ask, ask};
use shunt_serve_http::engine::{Options, run};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// The address of the proxy.
pub(crate) const PROXY: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8080);
/// Longer than anything takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A namespace with a proxy.
pub(crate) struct Lab {
    pub(crate) net: Arc<Net>,
    pub(crate) directory: TempDir,
    shutdown: Option<oneshot::Sender<()>>,
    proxy: Option<JoinHandle<()>>,
}

impl Lab {
    /// Returns a namespace without a proxy.
    pub(crate) fn new() -> Lab {
        let directory = TempDir::new().expect("a directory");
        Lab { net: Arc::new(Net::new()), directory, shutdown: None, proxy: None }
    }

    /// Starts the proxy with this file, after the backends. It serves when this returns.
    pub(crate) fn start(&mut self, file: &str) {
        self.write(file);
        let (net, file, control) = (self.net.clone(), self.file(), self.control());
        let (shutdown, until) = oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let drain = Duration::from_secs(5);
        let options = Options { listen: PROXY, file, threads: 1, control, metrics: Some(METRICS), drain };
        let serve = move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let hangup = signal(SignalKind::hangup()).expect("a signal");
                let until = async { drop(until.await) };
                run(options, move || ready.send(()).expect("the test waits"), hangup, until)
                    .await
                    .expect("the proxy runs");
            });
        };
        self.proxy = Some(std::thread::spawn(move || net.inside(serve)));
        self.shutdown = Some(shutdown);
        is_ready.recv().expect("the proxy is ready");
    }

    /// Asks the proxy to stop, and waits until it has.
    pub(crate) fn stop(&mut self) {
        self.begin_to_stop();
        if let Some(proxy) = self.proxy.take() {
            proxy.join().expect("the proxy does not panic");
        }
    }

    /// Asks the proxy to stop.
    pub(crate) fn begin_to_stop(&mut self) {
        if let Some(shutdown) = self.shutdown.take() {
            let _ = shutdown.send(());
        }
    }

    pub(crate) fn write(&self, file: &str) {
        std::fs::write(self.file(), file).expect("the file can be written");
    }

    pub(crate) fn reload(&self) {
        ask(&self.control(), Ask::Reload).expect("the file is right");
    }

    pub(crate) fn status(&self) -> Value {
        ask(&self.control(), Ask::Status).expect("the proxy answers")
    }

    /// Waits for a status.
    pub(crate) fn wait_for(&self, what: &str, is_reached: impl Fn(&Value) -> bool) {
        wait_until(what, || is_reached(&self.status()));
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("proxy.toml")
    }

    fn control(&self) -> PathBuf {
        self.directory.path().join("control")
    }

    /// Connects to the proxy.
    pub(crate) fn connect(&self) -> TcpStream {
        self.connect_to(PROXY)
    }

    pub(crate) fn connect_to(&self, address: SocketAddr) -> TcpStream {
        let stream = self.net.inside(|| TcpStream::connect(address)).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        stream.set_nodelay(true).expect("no delay");
        stream
    }

    /// Starts a backend, each of whose connections is served on a thread.
    pub(crate) fn backend(&self, port: u16, serve: impl Fn(TcpStream) + Send + Sync + 'static) {
        let listener = self.listen(port);
        let serve = Arc::new(serve);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let serve = serve.clone();
                std::thread::spawn(move || serve(stream));
            }
        });
    }

    pub(crate) fn listen(&self, port: u16) -> TcpListener {
        self.net.inside(|| TcpListener::bind(("127.0.0.1", port))).expect("the port is free")
    }

    /// Starts a backend that notes requests and replies to each with what `reply` returns.
    pub(crate) fn replying(
        &self,
        port: u16,
        reply: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static,
    ) -> Requests {
        let requests = Requests::default();
        let noted = requests.clone();
        self.backend(port, move |stream| {
            let (mut reader, mut stream) = (BufReader::new(stream.try_clone().expect("a copy")), stream);
            while let Some(request) = read_request(&mut reader) {
                let bytes = reply(&request);
                noted.0.lock().expect("no thread panics with it").push(request);
                if stream.write_all(&bytes).is_err() {
                    return;
                }
            }
        });
        requests
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.begin_to_stop();
        if let Some(proxy) = self.proxy.take() {
            let _ = proxy.join();
        }
    }
}

pub(crate) const METRICS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8081);

/// Requests that a backend has received.
#[derive(Clone, Default)]
pub(crate) struct Requests(pub(crate) Arc<Mutex<Vec<Request>>>);

impl Requests {
    pub(crate) fn take(&self) -> Vec<Request> {
        std::mem::take(&mut self.0.lock().expect("no thread panics with it"))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.lock().expect("no thread panics with it").len()
    }
}

/// A message as its receiver reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Request {
    /// The request line or status line.
    pub(crate) line: String,
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Vec<(String, String)>,
}

pub(crate) type Reply = Request;

impl Request {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.fields
            .iter()
            .find(|(other, _)| other.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub(crate) fn status(&self) -> u16 {
        self.line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }
}

fn read_line(from: &mut impl BufRead) -> Option<String> {
    let mut line = Vec::new();
    from.read_until(b'\n', &mut line).ok()?;
    let line = line.strip_suffix(b"\r\n")?;
    Some(String::from_utf8_lossy(line).into_owned())
}

fn read_fields(from: &mut impl BufRead) -> Option<Vec<(String, String)>> {
    let mut fields = Vec::new();
    loop {
        let line = read_line(from)?;
        if line.is_empty() {
            return Some(fields);
        }
        let (name, value) = line.split_once(": ").unwrap_or((&line, ""));
        fields.push((name.to_owned(), value.to_owned()));
    }
}

/// Reads a request, or returns `None` if it is not complete.
pub(crate) fn read_request(from: &mut impl BufRead) -> Option<Request> {
    let line = read_line(from)?;
    let mut request = Request { line, fields: read_fields(from)?, ..Request::default() };
    read_body(from, &mut request)?;
    Some(request)
}

fn read_body(from: &mut impl BufRead, message: &mut Request) -> Option<()> {
    if message.field("transfer-encoding") == Some("chunked") {
        loop {
            let size = usize::from_str_radix(&read_line(from)?, 16).ok()?;
            if size == 0 {
                message.trailers = read_fields(from)?;
                return Some(());
            }
            let begin = message.body.len();
            message.body.resize(begin + size, 0);
            from.read_exact(&mut message.body[begin..]).ok()?;
            read_line(from).filter(String::is_empty)?;
        }
    }
    let length = message.field("content-length").map_or(0, |length| length.parse().expect("a number"));
    message.body = vec![0; length];
    from.read_exact(&mut message.body).ok()
}

/// Reads a reply. Without a length, its body ends with the connection.
pub(crate) fn read_reply(from: &mut impl BufRead, to_head: bool) -> Option<Reply> {
    let line = read_line(from)?;
    let mut reply = Request { line, fields: read_fields(from)?, ..Request::default() };
    let has_none = to_head || reply.status() < 200 || matches!(reply.status(), 204 | 304);
    if has_none {
        return Some(reply);
    }
    if reply.field("transfer-encoding").is_none() && reply.field("content-length").is_none() {
        from.read_to_end(&mut reply.body).ok()?;
        return Some(reply);
    }
    read_body(from, &mut reply)?;
    Some(reply)
}

/// Sends bytes on a new connection, and returns the reply.
pub(crate) fn exchange(lab: &Lab, bytes: &[u8]) -> Option<Reply> {
    let mut stream = lab.connect();
    stream.write_all(bytes).expect("the proxy reads");
    read_reply(&mut BufReader::new(stream), bytes.starts_with(b"HEAD"))
}

/// Waits until something is true.
pub(crate) fn wait_until(what: &str, is_reached: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !is_reached() {
        assert!(begin.elapsed() < PATIENCE, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns a file with these backends, which are checked once an hour.
pub(crate) fn backends(ports: &[u16]) -> String {
    let entry = |port| format!("[[backend]]\naddress = '127.0.0.1:{port}'\n");
    format!("[health]\ninterval = 3600.0\n{}", ports.iter().map(entry).collect::<String>())
}

/// Returns a reply with a body.
pub(crate) fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Returns bytes that are different everywhere.
pub(crate) fn content(length: usize) -> Vec<u8> {
    let words = (0..length.div_ceil(8) as u64)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    words.take(length).collect()
}
