//! Runs a router: acquires what it needs of the host, serves its sockets, and answers requests.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shunt_control::{Asked, Control, serve_metrics};
use shunt_kernel::LoadError;
use shunt_kernel::names::Names;
use shunt_kernel::sequence::Reader;
use shunt_sys::proc::Fields;
use shunt_sys::{heap, limits};
use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::blocking_pool::elsewhere;
use crate::config::{ConfigError, Here, Loaded};
use crate::lock::lock;
use crate::map::Published;
use crate::policy::{Flow, Policy};
use crate::request::{ROUTER, Request};
use crate::resume::Former;
use crate::secure::Guard;
use crate::shared::Shared;
use crate::{adopt, decide, discovery, enforce, in_band, kubernetes, labels, listing, local, server, udp};

/// The reason for which a router does not run.
#[derive(Debug, Error)]
pub enum Error {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An address or a socket path cannot be listened on.
    #[error("cannot listen at {place}: {source}")]
    Listen {
        /// The address or path.
        place: String,
        /// The error.
        source: io::Error,
    },
    /// The kernel programs cannot be loaded. Without them programs would see the host's addresses.
    #[error(
        "the kernel's side of the overlay cannot be had, and without it programs would see the addresses of hosts: {0}"
    )]
    Kernel(#[from] LoadError),
    /// The kernel programs of secure mode cannot be loaded. Without them a container could use the
    /// host's sockets for anything.
    #[error(
        "the kernel's side of secure mode cannot be had: {0}; with secure = false in the configuration it goes without, for \
         programs that might as well run on the host network"
    )]
    Secure(LoadError),
    /// The router is under a seccomp filter itself. The kernel then does not show it the filters of
    /// others.
    #[error(
        "secure = true needs a router that is under no filter of system calls itself (in its unit: no RestrictAddressFamilies, \
         SystemCallFilter and the like), so that it can look whether programs are under theirs"
    )]
    Filtered,
    /// tokio could not register a socket.
    #[error("cannot wait for sockets: {0}")]
    Wait(io::Error),
}

/// The interval of [`Shared::sweep`].
const SWEEP: Duration = Duration::from_secs(1);

/// Runs a router until `shutdown` completes. `here` replaces parts of the configuration. Calls
/// `ready` when the router serves. Needs a tokio runtime with I/O and time.
pub async fn run(
    path: &Path,
    here: Here,
    ready: impl FnOnce(),
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let loaded = Loaded::read(path, &here)?;
    raise_descriptor_limit();
    // Otherwise the first line would hold up this thread, which does everything else too.
    shunt_tls::prepare();
    let control_path = loaded.config.control.clone();
    let control = Control::open(ROUTER, &control_path).map_err(listening(control_path.display()))?;
    let reader = Reader::load()?;
    // Attached before any socket is made, since only later sockets can have other names.
    let names = Names::attach()?;
    if loaded.config.secure && is_filtered() {
        return Err(Error::Filtered);
    }
    let guard = loaded.config.secure.then(|| Guard::new(&names)).transpose().map_err(Error::Secure)?;
    let listen_at = |address| listen(address).map_err(listening(address));
    let listeners = loaded.host().addresses().map(listen_at).collect::<Result<Vec<_>, _>>()?;
    let page = match loaded.config.metrics {
        Some(address) => Some(TcpListener::bind(address).await.map_err(listening(address))?),
        None => None,
    };
    let place = Place(loaded.config.socket.clone());
    let supervisors = local::listen(&place.0).map_err(listening(place.0.display()))?;
    let shared = Shared::new(loaded, names, guard, reader).map_err(Error::Wait)?;
    let shared = Arc::new(shared);
    adopt::connections(&shared);
    udp::begin(&shared);
    labels::begin(&shared).await;
    enforce::begin(&shared).await;
    shared.publish(Published::default());
    let hangup = signal(SignalKind::hangup()).map_err(Error::Wait)?;
    let (sender, mut asked) = mpsc::channel(16);
    heap::trim();
    let former = Former::read(&shared.loaded().config);
    let serve_others = async {
        former.await_return(&shared).await;
        ready();
        serve_others(&shared, listeners).await;
    };
    tokio::select! {
        () = shutdown => {}
        () = control.serve(sender) => {}
        () = answer(&shared, &mut asked) => {}
        () = sweep(&shared) => {}
        () = serve_others => {}
        () = reload(&shared, (path, &here), hangup) => {}
        () = discover(&shared) => {}
        () = kubernetes::run(&shared) => {}
        () = in_band::run(&shared) => {}
        () = labels::run(&shared) => {}
        () = udp::run(&shared) => {}
        () = serve_page(&shared, page) => {}
        ended = local::serve(shared.clone(), supervisors) => ended.map_err(Error::Wait)?,
    }
    shared.promises.end();
    udp::end(&shared).await;
    shared.discovery.withdraw().await;
    Ok(())
}

/// Reads the configuration again on SIGHUP.
async fn reload(shared: &Arc<Shared>, (path, here): (&Path, &Here), mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        let (path, here) = (path.to_owned(), here.clone());
        match elsewhere(move || Loaded::read(&path, &here)).await {
            Ok(read) => {
                let (loaded, kept) = shared.loaded().renewed(read);
                if !kept.is_empty() {
                    tracing::warn!(
                        what = kept.join(", "),
                        "this changes only when the router is started anew"
                    );
                }
                let former = shared.loaded().policy.clone();
                let next = after_reload(&former, &loaded.policy, lock(&shared.layers).own());
                let policy = loaded.policy.clone();
                shared.reload(loaded);
                match next {
                    Next::OfFile => drop(enforce::apply(shared, policy).await),
                    Next::OfFileInstead => {
                        tracing::warn!(
                            "the policy file has changed: it replaces the policy that was set with `shunt overlay policy apply`"
                        );
                        enforce::apply(shared, policy).await;
                    }
                    Next::Kept => tracing::warn!(
                        "the policy that was set with `shunt overlay policy apply` stays in effect, because the policy file has not changed; apply the file to return to it"
                    ),
                }
                tracing::info!("the configuration has been read again");
            }
            Err(error) => tracing::error!(%error, "the configuration stays as it was"),
        }
    }
}

/// The policy in effect after a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The file's, which was in effect before.
    OfFile,
    /// The file's, instead of one that was set through the control socket.
    OfFileInstead,
    /// The one that was set through the control socket.
    Kept,
}

/// Decides about the policy of a reload. A policy that was set through the control socket stays in
/// effect as long as the file says the same as before: a reload for another reason must not permit
/// what an operator has just forbidden.
fn after_reload(former: &Policy, read: &Policy, current: &Policy) -> Next {
    if current == former {
        Next::OfFile
    } else if read == former {
        Next::Kept
    } else {
        Next::OfFileInstead
    }
}

/// Serves the metrics page, if there is one, until the router ends.
async fn serve_page(shared: &Arc<Shared>, page: Option<TcpListener>) {
    match page {
        Some(listener) => {
            let text = async || {
                let shared = shared.clone();
                elsewhere(move || shared.metrics.text(&shared)).await
            };
            serve_metrics(text, listener).await;
        }
        None => std::future::pending().await,
    }
}

/// Accepts connections of other routers until this one ends.
async fn serve_others(shared: &Arc<Shared>, listeners: Vec<TcpListener>) {
    let mut serving: JoinSet<()> =
        listeners.into_iter().map(|listener| server::serve(shared.clone(), listener)).collect();
    while serving.join_next().await.is_some() {}
}

/// Runs the discovery by etcd, if it is configured, until the router ends.
async fn discover(shared: &Arc<Shared>) {
    let etcd = shared.loaded().config.etcd.clone();
    match etcd {
        Some(etcd) => discovery::run(shared, &etcd).await,
        None => std::future::pending().await,
    }
}

/// The path of the supervisors' socket, which is removed when the router ends.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn answer(shared: &Arc<Shared>, asked: &mut mpsc::Receiver<Asked<Request>>) {
    let began = Instant::now();
    while let Some((request, answer)) = asked.recv().await {
        let answered = match request {
            Request::Status => status(shared, began),
            Request::Connections => {
                let shared = shared.clone();
                elsewhere(move || listing::report(&shared)).await
            }
            Request::Policy => {
                let shared = shared.clone();
                elsewhere(move || enforce::report(&shared)).await
            }
            Request::Decide { client, port, server } => {
                let flow = Flow { source: client, source_port: port, destination: server };
                decide::report(&shared.connections.policy(), flow)
            }
            Request::Apply(policy) => enforce::apply(shared, Arc::new(policy)).await,
        };
        let _ = answer.send(Ok(answered));
    }
}

fn status(shared: &Shared, began: Instant) -> Value {
    let config = &shared.loaded().config;
    json!({
        "name": config.name,
        "protocol": config.protocol,
        "uptime-seconds": began.elapsed().as_secs(),
        "without-lsm": shared.guard.as_ref().and_then(Guard::without_lsm),
        "connections": shared.metrics.report(),
        "now": shared.report(),
        "config": config,
    })
}

async fn sweep(shared: &Arc<Shared>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let shared = shared.clone();
        elsewhere(move || shared.sweep()).await;
    }
}

/// Listens for both address families if the kernel has both. An accepted IPv6 socket can become an
/// IPv4 socket, but not the other way round.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let mapped = match address {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        v6 => v6,
    };
    let socket = match open(Domain::IPV6, mapped) {
        Err(error) if is_missing(&error) => open(Domain::IPV4, address)?,
        opened => opened?,
    };
    TcpListener::from_std(socket.into())
}

fn open(domain: Domain, address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket)
}

/// Returns `true` for the error of a kernel without IPv6.
fn is_missing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
}

fn listening(place: impl ToString) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Listen { place: place.to_string(), source }
}

/// Returns `true` if this process is under a seccomp filter.
fn is_filtered() -> bool {
    Fields::status("self").is_ok_and(|status| status.get("Seccomp").is_some_and(|mode| mode != "0"))
}

/// Raises the limit, since each conversation takes several descriptors.
fn raise_descriptor_limit() {
    if let Err(error) = limits::raise_descriptors() {
        tracing::debug!(%error, "the descriptor limit stays as it is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_keeps_the_policy_that_was_set_unless_the_file_has_another_one() {
        let policy = |default: &str| {
            serde_json::from_value::<Policy>(json!({ "default": default, "rules": [] })).unwrap()
        };
        let (open, deny, dropped) = (policy("allow"), policy("deny"), policy("drop"));
        assert_eq!(after_reload(&open, &open, &open), Next::OfFile);
        assert_eq!(after_reload(&open, &deny, &open), Next::OfFile);
        assert_eq!(after_reload(&open, &open, &deny), Next::Kept);
        assert_eq!(after_reload(&open, &dropped, &deny), Next::OfFileInstead);
        assert_eq!(after_reload(&open, &deny, &deny), Next::OfFileInstead);
    }
}
