//! Runs a service in a separate network namespace, with backends, and clients that check every
//! byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde_json::Value;
use shunt_netns::Net;
use shunt_serve::cache::{self, Cache};
use shunt_serve::engine::{self, Address, Engine, Files, Limit, Options, Request};
use shunt_serve::pubsub::PubSub;
use shunt_serve::service::store::Store;
use shunt_serve::service::{Service, builtin};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// A running service, which ends when this value is dropped.
pub(crate) struct Serving {
    pub(crate) net: Net,
    pub(crate) address: SocketAddr,
    /// The memory of the service's state, which outlives the service.
    #[allow(dead_code, reason = "not every test reads it")]
    pub(crate) store: Arc<Store>,
    directory: TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Options that few tests need.
#[derive(Default)]
struct Extra {
    limit: Option<Limit>,
    listen: Vec<Address>,
    /// Files of content stores.
    files: Vec<Files>,
    may_register: Vec<IpNet>,
    drain: Option<Duration>,
    /// The file of backends.
    backends: String,
    /// The test does not wait for the kernel half.
    is_early: bool,
}

pub(crate) const ENGINES: [Engine; 3] = [Engine::User, Engine::Kernel, Engine::Auto];

impl Serving {
    /// Starts a builtin service, with a file of backends if `backends` is not empty.
    pub(crate) fn start(net: Net, name: &str, engine: Engine, backends: &[SocketAddr]) -> Serving {
        Serving::builtin(net, name, engine, Extra { backends: toml(backends), ..Extra::default() })
    }

    /// Starts a builtin service that allows each address so many messages a second, and a burst.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn limited(net: Net, name: &str, engine: Engine, rate: f64, burst: u64) -> Serving {
        let builtin = builtin::named(name).expect("a builtin");
        let limit = Limit::new(rate, burst, builtin.native.state());
        Serving::builtin(net, name, engine, Extra { limit: Some(limit), ..Extra::default() })
    }

    /// Starts a builtin service that listens at more addresses, with backends at any addresses.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn at(
        net: Net,
        name: &str,
        engine: Engine,
        listen: &[Address],
        backends: &[Address],
    ) -> Serving {
        let extra = Extra { listen: listen.to_vec(), backends: toml(backends), ..Extra::default() };
        Serving::builtin(net, name, engine, extra)
    }

    /// Starts a builtin service with the automatic engine, whose kernel half may still be loading.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn early(net: Net, name: &str) -> Serving {
        let extra = Extra { is_early: true, ..Extra::default() };
        Serving::builtin(net, name, Engine::Auto, extra)
    }

    /// Starts a builtin service that cuts the connections that are open so long after its end began.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn draining(net: Net, name: &str, engine: Engine, drain: Duration) -> Serving {
        let extra = Extra { drain: Some(drain), ..Extra::default() };
        Serving::builtin(net, name, engine, extra)
    }

    /// Starts a builtin service that may register backends of a network, without one at first.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn registering(net: Net, name: &str, engine: Engine, network: &str) -> Serving {
        let extra = Extra { may_register: vec![network.parse().unwrap()], ..Extra::default() };
        Serving::builtin(net, name, engine, extra)
    }

    /// Starts a builtin service whose content stores are filled with files.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn filled(
        net: Net,
        name: &str,
        engine: Engine,
        files: &[Files],
        backends: &[SocketAddr],
    ) -> Serving {
        let extra = Extra { files: files.to_vec(), backends: toml(backends), ..Extra::default() };
        Serving::builtin(net, name, engine, extra)
    }

    fn builtin(net: Net, name: &str, engine: Engine, extra: Extra) -> Serving {
        let builtin = builtin::named(name).expect("a builtin");
        // The buckets of a limit are behind the service's state.
        let size = extra.limit.as_ref().map_or(builtin.native.state(), Limit::size);
        let store = Store::new(size, engine != Engine::User).unwrap();
        let service = Arc::new(builtin.native.with_store(store.clone()));
        Serving::run_with(net, (service, builtin.object), (store, None), engine, extra)
    }

    /// Starts the cache.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn cache(net: Net, engine: Engine, memory: usize) -> Serving {
        let cache = Cache::new(memory, 2, engine != Engine::User).unwrap();
        let store = Store::new(0, engine != Engine::User).unwrap();
        let contents = Some(cache.store().clone());
        Serving::run(net, (Arc::new(cache), cache::object()), (store, contents), engine, &[])
    }

    /// Starts the publish/subscribe hub.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn pubsub(net: Net) -> Serving {
        let store = Store::new(0, false).unwrap();
        Serving::run(net, (Arc::new(PubSub::default()), &[]), (store, None), Engine::User, &[])
    }

    fn run(
        net: Net,
        (service, object): (Arc<dyn Service>, &[u8]),
        (store, contents): (Arc<Store>, Option<Arc<Store>>),
        engine: Engine,
        backends: &[SocketAddr],
    ) -> Serving {
        let extra = Extra { backends: toml(backends), ..Extra::default() };
        Serving::run_with(net, (service, object), (store, contents), engine, extra)
    }

    fn run_with(
        net: Net,
        (service, object): (Arc<dyn Service>, &[u8]),
        (store, contents): (Arc<Store>, Option<Arc<Store>>),
        engine: Engine,
        extra: Extra,
    ) -> Serving {
        let (directory, kept) = (tempfile::tempdir().unwrap(), store.clone());
        let address = "127.0.0.1:4000".parse().unwrap();
        let file = directory.path().join("backends.toml");
        std::fs::write(&file, &extra.backends).unwrap();
        let options = Options {
            service,
            object: object.to_vec(),
            store,
            contents,
            verify: false,
            listen: [vec![Address::Tcp(address)], extra.listen].concat(),
            files: extra.files,
            may_register: extra.may_register,
            backends: (!extra.backends.is_empty()).then_some(file),
            engine,
            hashing: None,
            limit: extra.limit,
            // Each thread has its own kernel engine.
            threads: 2,
            control: directory.path().join("control"),
            metrics: None,
            drain: extra.drain.unwrap_or(Duration::from_secs(2)),
        };
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = net.inside(|| {
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let hangup = signal(SignalKind::hangup()).unwrap();
                    let ready = move || ready.send(()).unwrap();
                    let shutdown = async { drop(stopped.await) };
                    engine::run(options, ready, hangup, shutdown).await.unwrap();
                });
            })
        });
        is_ready.recv().expect("the service runs; as root, for it loads programs into the kernel");
        let serving =
            Serving { net, address, store: kept, directory, stop: Some(stop), thread: Some(thread) };
        if !extra.is_early {
            serving.wait("the kernel half is loaded", |status| status["kernel-half"] != "loading");
        }
        let status = serving.status();
        assert_eq!(status["without-kernel"], Value::Null, "{status:#}");
        serving
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = self.net.inside(|| TcpStream::connect(self.address)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub(crate) fn status(&self) -> Value {
        engine::ask(&self.control(), Request::Status).unwrap()
    }

    /// Returns a part of the service's state.
    #[allow(dead_code, reason = "not every service has state")]
    pub(crate) fn dump(&self, name: &str) -> Value {
        engine::ask(&self.control(), Request::Dump(name.to_owned())).unwrap()
    }

    /// Replaces the backends.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn reload(&self, backends: &[SocketAddr]) {
        self.reload_with("", backends);
    }

    /// Replaces the file of backends. `more` precedes the backends.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn reload_with(&self, more: &str, backends: &[SocketAddr]) {
        let text = format!("{more}\n{}", toml(backends));
        std::fs::write(self.directory.path().join("backends.toml"), text).unwrap();
        engine::ask(&self.control(), Request::Reload).unwrap();
    }

    /// Adds a backend, or removes one.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn change(&self, request: Request) -> Result<Value, String> {
        engine::ask(&self.control(), request).map_err(|error| error.to_string())
    }

    /// Waits until the status satisfies `is_so`.
    pub(crate) fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        let began = Instant::now();
        loop {
            let status = self.status();
            if is_so(&status) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{what}: {status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Has a client do `more` until the status satisfies `is_so`. On a busy machine, the automatic
    /// engine waits before it moves a conversation.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn until(&self, mut more: impl FnMut(), is_so: impl Fn(&Value) -> bool) {
        let began = Instant::now();
        loop {
            let status = self.status();
            if is_so(&status) {
                return;
            }
            assert!(began.elapsed() < PATIENCE * 6, "{status:#}");
            more();
        }
    }

    /// Has a client do `more` until the kernel has a conversation.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn until_in_kernel(&self, more: impl FnMut()) {
        self.until(more, |status| status["in-kernel"] == 1);
    }

    fn control(&self) -> PathBuf {
        self.directory.path().join("control")
    }
}

impl Serving {
    /// Ends the service, and waits for that.
    pub(crate) fn end(&mut self) {
        drop(self.stop.take());
        let joined = self.thread.take().map_or(Ok(()), JoinHandle::join);
        if !std::thread::panicking() {
            joined.unwrap();
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end();
    }
}

/// A time-out that no correct run reaches.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

fn toml(backends: &[impl std::fmt::Display]) -> String {
    backends.iter().map(|address| format!("[[backend]]\naddress = '{address}'\n")).collect()
}

/// Returns a message for length-router and length-echo: its length, a key, a number, and bytes that
/// are derived from the number.
pub(crate) fn message(key: u32, number: u32, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; 12 + length];
    bytes[..4].copy_from_slice(&(8 + length as u32).to_be_bytes());
    bytes[4..8].copy_from_slice(&key.to_be_bytes());
    bytes[8..12].copy_from_slice(&number.to_be_bytes());
    for (at, byte) in bytes[12..].iter_mut().enumerate() {
        *byte = (number as usize).wrapping_mul(31).wrapping_add(at) as u8;
    }
    bytes
}

/// Reads one message.
pub(crate) fn read_message(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    stream.read_exact(&mut bytes)?;
    let length = u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize;
    bytes.resize(4 + length, 0);
    stream.read_exact(&mut bytes[4..])?;
    Ok(bytes)
}

/// A backend that answers each message with itself.
pub(crate) struct Backend {
    pub(crate) address: SocketAddr,
    pub(crate) messages: Arc<AtomicU64>,
    /// While set, the backend neither reads nor answers.
    pub(crate) paused: Arc<AtomicBool>,
    /// Each connection is reset after this many messages; 0 means never.
    pub(crate) resets_after: Arc<AtomicU64>,
}

impl Backend {
    pub(crate) fn start(net: &Net, port: u16) -> Backend {
        let address: SocketAddr = ([127, 0, 0, 1], port).into();
        let listener = net.inside(|| TcpListener::bind(address)).unwrap();
        let backend = Backend {
            address,
            messages: Arc::default(),
            paused: Arc::default(),
            resets_after: Arc::default(),
        };
        let (messages, paused, resets) =
            (backend.messages.clone(), backend.paused.clone(), backend.resets_after.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (messages, paused, resets) = (messages.clone(), paused.clone(), resets.clone());
                std::thread::spawn(move || serve(stream, &messages, &paused, &resets));
            }
        });
        backend
    }
}

fn serve(mut stream: TcpStream, messages: &AtomicU64, paused: &AtomicBool, resets: &AtomicU64) {
    stream.set_nodelay(true).unwrap();
    let mut reader = std::io::BufReader::with_capacity(1 << 16, stream.try_clone().unwrap());
    for count in 1.. {
        while paused.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let Ok(message) = read_message(&mut reader) else { return };
        if count == resets.load(SeqCst) {
            let socket = socket2::SockRef::from(&stream);
            socket.set_linger(Some(Duration::ZERO)).unwrap();
            return;
        }
        messages.fetch_add(1, SeqCst);
        if stream.write_all(&message).is_err() {
            return;
        }
    }
}
