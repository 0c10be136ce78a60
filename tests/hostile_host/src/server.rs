//! A server of one user, to which a process of another user connects. It handles links as an honest
//! process does, and measures the duration of each of its calls.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shunt_abi::control::{Mapped, Reply};
use shunt_abi::geometry::Geometry;
use shunt_sys::mapping::Mapping;

use crate::Broker;
use crate::client::{Client, Trouble};
use crate::victims::{enter, user};

/// The port on which it listens.
pub(crate) const PORT: u16 = 7070;

/// The observations of a server.
#[derive(Clone, Debug, Default)]
pub struct Met {
    /// Number of links that it has mapped.
    pub links: u64,
    /// Number of connections that were paired.
    pub pairs: u64,
    /// Number of links that could not be sealed.
    pub unsealed: u64,
    /// Longest duration of a call that mapped, touched or unmapped memory.
    pub longest: Duration,
    /// Errors, in words.
    pub troubles: Vec<String>,
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Met>,
}

impl Server {
    /// Starts the server as an ordinary user on the host. Returns once it listens.
    pub fn start(broker: &Broker) -> Server {
        let (stop, socket) = (Arc::new(AtomicBool::new(false)), broker.socket());
        let (until, prepare) = (stop.clone(), enter(&broker.host));
        let (ready, listens) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            prepare();
            user(4322);
            let listener = TcpListener::bind(("127.0.0.1", PORT)).expect("loopback is up");
            listener.set_nonblocking(true).expect("a socket");
            let client = Client::connect(&socket).expect("the broker takes it in");
            ready.send(()).expect("somebody waits");
            let mut met = Met::default();
            if let Err(trouble) = serve(&client, &listener, &until, &mut met) {
                met.troubles.push(format!("{trouble:?}"));
            }
            met
        });
        listens.recv().expect("it starts");
        Server { stop, thread }
    }

    /// Stops the server, and returns its observations.
    pub fn stop(self) -> Met {
        self.stop.store(true, Relaxed);
        self.thread.join().expect("no panic")
    }
}

fn serve(client: &Client, listener: &TcpListener, stop: &AtomicBool, met: &mut Met) -> Result<(), Trouble> {
    let mut connections: Vec<TcpStream> = Vec::new();
    let mut links: Vec<(u64, Mapping)> = Vec::new();
    while !stop.load(Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                client.offer(connections.len() as u64, &stream)?;
                connections.push(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => met.troubles.push(error.to_string()),
        }
        let (reply, fd) = match client.receive(Duration::from_millis(1)) {
            Err(Trouble::Silent) => continue,
            received => received?,
        };
        let begun = Instant::now();
        match (reply, fd) {
            (Reply::Link(link), Some(memory)) => {
                let mapping = map(link.ring_bytes, &memory);
                drop(memory);
                met.longest = met.longest.max(begun.elapsed());
                client.say(
                    Mapped { link: link.link, side: link.side, is_mapped: mapping.is_some().into() },
                    &[],
                )?;
                links.extend(mapping.map(|mapping| (link.link, mapping)));
                met.links += 1;
            }
            (Reply::Pair(pair), _) => {
                if let Some((_, mapping)) = links.iter().find(|(link, _)| *link == pair.link) {
                    mapping.set_stays(false);
                    mapping.word(0).expect("a word").fetch_add(0, Relaxed);
                }
                met.pairs += 1;
                client.release(&pair)?;
            }
            (Reply::Unlink(told), _) => {
                links.retain(|(link, mapping)| {
                    if *link == told.link {
                        mapping.set_stays(told.may_unmap == 0);
                    }
                    *link != told.link
                });
                met.unsealed += u64::from(told.may_unmap == 0);
            }
            _ => {}
        }
        met.longest = met.longest.max(begun.elapsed());
    }
    Ok(())
}

/// Maps a link. It stays mapped until it is known to be sealed.
fn map(ring_bytes: u64, memory: &OwnedFd) -> Option<Mapping> {
    let mapping = Mapping::map(memory, Geometry::new(ring_bytes as usize)?.link_bytes()).ok()?;
    mapping.set_stays(true);
    Some(mapping)
}
