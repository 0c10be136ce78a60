//! Programs that the broker serves all the time: each has connection after connection paired, and every now and then a
//! process of it is new. What they meet is counted: pairs, refusals, hang-ups, and the longest that one had to wait.

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{
    LinkNameSpaceType, move_into_link_name_space, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use shunt_abi::control::{Pair, Reply};
use shunt_netns::Net;

use crate::Broker;
use crate::client::{Client, PATIENCE, Trouble, pair_at};

/// Pairs between which a victim is the same process.
const PAIRS_OF_A_PROCESS: u64 = 20;
/// So that they leave the processor to the attack, too.
const PAUSE: Duration = Duration::from_millis(2);

/// What the victims have met.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// Connections that were paired.
    pub pairs: u64,
    /// The longest from an offer to its pair.
    pub longest: Duration,
    /// Everything else, in words.
    pub troubles: Vec<String>,
}

/// Victims at work.
#[derive(Debug)]
pub struct Victims {
    stop: Arc<AtomicBool>,
    threads: Vec<(&'static str, JoinHandle<Served>)>,
}

/// Turns the calling thread into one of an ordinary user's.
pub(crate) fn user(uid: u32) {
    let (uid, gid) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
    set_thread_groups(&[]).expect("root may");
    set_thread_res_gid(gid, gid, gid).expect("root may");
    set_thread_res_uid(uid, uid, uid).expect("root may");
}

/// Returns what moves the calling thread into a network namespace.
pub(crate) fn enter(net: &Net) -> impl FnOnce() + Send + 'static {
    let file = std::fs::File::open(net.path()).expect("a namespace");
    move || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("root may");
    }
}

impl Victims {
    /// Root on the host, a user on the host, and root in a container.
    pub fn start(broker: &Broker) -> Victims {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        let mut add = |name: &'static str, prepare: Box<dyn FnOnce() + Send>| {
            let (stop, socket) = (stop.clone(), broker.socket());
            let thread = std::thread::spawn(move || {
                prepare();
                serve(&socket, &stop)
            });
            threads.push((name, thread));
        };
        let (host, again) = (enter(&broker.host), enter(&broker.host));
        let container = enter(&Net::new());
        add("root on the host", Box::new(host));
        add(
            "a user on the host",
            Box::new(move || {
                again();
                user(4321);
            }),
        );
        add("root in a container", Box::new(container));
        Victims { stop, threads }
    }

    /// Ends them, and says what each has met.
    pub fn stop(self) -> Vec<(&'static str, Served)> {
        self.stop.store(true, Relaxed);
        let ended = self.threads.into_iter().map(|(name, thread)| (name, thread.join().expect("no panic")));
        ended.collect()
    }
}

fn serve(broker: &Path, stop: &AtomicBool) -> Served {
    let mut served = Served::default();
    let broker = PathBuf::from(broker);
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
    while !stop.load(Relaxed) && served.troubles.len() < 5 {
        if let Err(trouble) = process(&broker, &listener, stop, &mut served) {
            served.troubles.push(trouble);
        }
    }
    served
}

/// The life of two processes.
fn process(
    broker: &Path,
    listener: &TcpListener,
    stop: &AtomicBool,
    served: &mut Served,
) -> Result<(), String> {
    let trouble = |what: &'static str| {
        move |trouble| match trouble {
            Trouble::HungUp => format!("hung up on {what}"),
            Trouble::Silent => format!("no answer {what}"),
        }
    };
    let clients = [0, 1].map(|_| Client::connect(broker));
    let [one, two] = clients.map(|client| client.map_err(trouble("at the hello")));
    let (one, two) = (one?, two?);
    for ticket in 0..PAIRS_OF_A_PROCESS {
        if stop.load(Relaxed) {
            return Ok(());
        }
        let (client, server) = pair_at(listener).map_err(|error| error.to_string())?;
        let start = Instant::now();
        one.offer(ticket, &client).map_err(trouble("at an offer"))?;
        two.offer(ticket, &server).map_err(trouble("at an offer"))?;
        let ends = [&one, &two];
        for (end, pair) in ends.into_iter().zip(wait_for_pairs(ends, ticket)?) {
            end.release(&pair).map_err(trouble("at a release"))?;
        }
        served.longest = served.longest.max(start.elapsed());
        served.pairs += 1;
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Both ends listen all the time: a link comes about once both have answered.
fn wait_for_pairs(ends: [&Client; 2], wanted: u64) -> Result<[Pair; 2], String> {
    let deadline = Instant::now() + PATIENCE;
    let mut pairs = [None, None];
    loop {
        for (end, pair) in ends.into_iter().zip(&mut pairs).filter(|(_, pair)| pair.is_none()) {
            match end.next(Duration::from_millis(1)) {
                Ok(Reply::Pair(told)) if told.ticket == wanted => *pair = Some(told),
                Ok(Reply::Refused(refused)) => return Err(format!("refused: {refused:?}")),
                Err(Trouble::Silent) if Instant::now() < deadline => {}
                Err(trouble) => return Err(format!("{trouble:?} while waiting for a pair")),
                Ok(_) => {}
            }
        }
        if let [Some(one), Some(two)] = pairs {
            return Ok([one, two]);
        }
    }
}
