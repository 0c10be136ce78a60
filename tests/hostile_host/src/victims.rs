//! Programs that the broker serves all the time. Each has one connection after another paired, and
//! replaces its processes from time to time. They count pairs, refusals and closed connections, and
//! measure the longest wait.

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

/// Number of pairs after which a victim replaces its processes.
const PAIRS_OF_A_PROCESS: u64 = 20;
/// The delay between two pairs, which leaves processor time to the attack.
const PAUSE: Duration = Duration::from_millis(2);

/// The observations of a victim.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// Number of connections that were paired.
    pub pairs: u64,
    /// Longest time from an offer to its pair.
    pub longest: Duration,
    /// Errors, in words.
    pub troubles: Vec<String>,
}

/// Running victims.
#[derive(Debug)]
pub struct Victims {
    stop: Arc<AtomicBool>,
    threads: Vec<(&'static str, JoinHandle<Served>)>,
}

/// Makes the calling thread run as an ordinary user.
pub(crate) fn user(uid: u32) {
    let (uid, gid) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
    set_thread_groups(&[]).expect("root may");
    set_thread_res_gid(gid, gid, gid).expect("root may");
    set_thread_res_uid(uid, uid, uid).expect("root may");
}

/// Returns a closure that moves the calling thread into a network namespace.
pub(crate) fn enter(net: &Net) -> impl FnOnce() + Send + 'static {
    let file = std::fs::File::open(net.path()).expect("a namespace");
    move || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("root may");
    }
}

impl Victims {
    /// Starts victims as root on the host, as a user on the host, and as root in a container.
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

    /// Stops the victims, and returns the observations of each.
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

/// Pairs connections between two processes, until they are replaced.
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

/// Receives for both ends in turn, because a link is ready only after both have answered.
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
