//! Runs each attack as each kind of stranger that can make it, while the broker serves others. They
//! must not notice, and the attack must leave nothing behind. Needs root.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shunt_channel::{Cause, Event, Message, Options, ReceiveError, Receiver, Sender, Wait};
use shunt_hostile_host::attack::MESSAGES;
use shunt_hostile_host::{Broker, Server, Stranger, Victims, Who};

/// Maximum memory in bytes that strangers may make the broker hold. It is part of the limit in its
/// systemd unit.
const MEMORY: u64 = 512 << 20;
/// Maximum bytes that strangers may make the broker log.
const LOG: usize = 256 << 10;
/// How long each attack runs after its start.
const UNDER_ATTACK: Duration = Duration::from_secs(1);
/// A call that waits for no hole punch takes less than this, even on a loaded machine.
const NOT_A_PUNCH: Duration = Duration::from_secs(1);
/// Time that the broker has to release everything that a stranger held.
const SETTLE: Duration = Duration::from_secs(30);

/// Serialises the tests of one kind of stranger, because each exhausts its user's limits.
fn turn(who: Who) -> MutexGuard<'static, ()> {
    static TURNS: [Mutex<()>; 3] = [const { Mutex::new(()) }; 3];
    TURNS[who as usize].lock().unwrap_or_else(PoisonError::into_inner)
}

fn attacker() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_attack"))
}

/// Checks that victims are served before and during the attack, and that nothing is left after it.
fn nobody_notices(attack: &str, who: Who) {
    let _turn = turn(who);
    let mut broker = Broker::start();
    let descriptors = broker.descriptors();
    let victims = Victims::start(&broker);
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    let stranger = Stranger::start(&broker, attacker(), who, attack);
    let begun = start.elapsed();
    let (from, before) = (Instant::now(), broker.time_of_the_serving_thread());
    let until = from + UNDER_ATTACK;
    while Instant::now() < until {
        if let Err(error) = broker.status() {
            panic!("root is not told the status: {error}");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let (busy, all) = (broker.time_of_the_serving_thread() - before, from.elapsed());
    let memory = broker.memory();
    let served = victims.stop();
    eprintln!(
        "{attack} by {who:?}: {}; under way after {begun:?}; {} MiB; busy for {busy:?} of {all:?}",
        stranger.report,
        memory >> 20
    );
    for (name, served) in served {
        eprintln!("  {name}: {} pairs, the longest wait {:?}", served.pairs, served.longest);
        assert!(served.troubles.is_empty(), "{name} noticed {attack} by {who:?}: {:?}", served.troubles);
        assert!(served.pairs >= 10, "{name} had only {} pairs", served.pairs);
    }
    assert!(broker.is_running(), "the broker is gone");
    assert!(memory < MEMORY, "{} MiB of memory", memory >> 20);
    assert!(broker.log().len() < LOG, "a log of {} bytes", broker.log().len());
    drop(stranger);
    let deadline = Instant::now() + SETTLE;
    loop {
        let (now, known) = (broker.descriptors(), broker.status().expect("a status").processes.len());
        if known == 0 && now <= descriptors + 2 {
            break;
        }
        assert!(Instant::now() < deadline, "{now} descriptors, {descriptors} before; {known} processes");
        std::thread::sleep(Duration::from_millis(50));
    }
}

macro_rules! attacks {
    ($($name:ident: $attack:literal by $($who:ident),+;)+) => {
        $(#[test]
        fn $name() {
            $(nobody_notices($attack, Who::$who);)+
        })+
    };
}

attacks! {
    clients_that_say_nothing: "silent-clients" by User, Container;
    as_many_processes_as_there_can_be: "processes" by User, Container;
    one_page_shown_by_many: "one-page" by User, Container;
    a_status_that_nobody_reads: "statuses" by User, Container;
    offers_that_nobody_answers: "open-offers" by User, Container;
    offers_of_what_is_gone: "dead-offers" by User, Container;
    rubbish: "rubbish" by User, Container;
    programs_of_another_version: "old-versions" by User;
    pairs_that_nobody_hears_of: "unread" by User, Container;
    locks_that_are_held: "locks" by Holder;
    sockets_that_linger: "lingering" by User, Container;
    links_of_everybody_with_everybody: "links" by User, Container;
    doorbells_by_the_thousand: "doorbells" by User, Container;
    pages_into_which_holes_are_punched: "punched-pages" by User, Container;
    sockets_that_are_watched_without_end: "watched-sockets" by User, Container;
    doorbells_that_are_watched_without_end: "slow-doorbells" by User, Container;
    bytes_to_send_for_it_without_end: "endless-remainders" by User, Container;
    links_into_which_holes_are_punched: "punched-links" by User, Container;
}

/// A peer of another user tries to take away the memory of its links with a server. No call of the
/// server may be delayed.
#[test]
fn a_server_does_not_wait_for_a_peer_that_punches() {
    let _turn = turn(Who::User);
    let broker = Broker::start();
    let server = Server::start(&broker);
    let victims = Victims::start(&broker);
    let stranger = Stranger::start(&broker, attacker(), Who::User, "punching-peer");
    let begun = Instant::now();
    // Long enough for the attack to prevent a link from being sealed. From then on the two users
    // share no memory.
    while begun.elapsed() < Duration::from_secs(20) {
        broker.status().expect("root is told the status");
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(stranger);
    let met = server.stop();
    eprintln!("{met:?}");
    for (name, served) in victims.stop() {
        eprintln!("  {name}: {} pairs, the longest wait {:?}", served.pairs, served.longest);
        assert!(served.troubles.is_empty() && served.pairs >= 10, "{name}: {served:?}");
    }
    assert!(met.troubles.is_empty() && met.links > 0 && met.pairs > 0, "{met:?}");
    // Waiting for a hole punch would take hundreds of milliseconds here.
    assert!(met.longest < NOT_A_PUNCH, "{met:?}");
}

/// Neither another user nor root of a container can take the broker's path. Both can still connect.
#[test]
fn nobody_takes_its_place() {
    let _turns = [turn(Who::User), turn(Who::Container)];
    let broker = Broker::start();
    for who in [Who::User, Who::Container] {
        let stranger = Stranger::start(&broker, attacker(), who, "replace");
        assert_eq!(stranger.report, "at work: connect", "{who:?}");
    }
    broker.status().expect("it is still the broker's");
}

/// Neither another user nor root of a container can hold a lock that the successor of a killed
/// broker needs.
#[test]
fn nobody_keeps_it_from_starting_again() {
    let _turns = [turn(Who::User), turn(Who::Container)];
    let mut broker = Broker::start();
    let strangers =
        [Who::User, Who::Container].map(|who| Stranger::start(&broker, attacker(), who, "file-locks"));
    assert_eq!(strangers.each_ref().map(|stranger| stranger.report.as_str()), ["at work: 0"; 2]);
    broker.kill_and_start_again();
    broker.status().expect("a broker answers");
}

/// Neither another user nor root of a container sees what other users do.
#[test]
fn nobody_is_told_of_others() {
    let _turns = [turn(Who::User), turn(Who::Container)];
    let broker = Broker::start();
    let victims = Victims::start(&broker);
    std::thread::sleep(Duration::from_millis(500));
    // An invalid message from root.
    let socket = broker.socket();
    broker.host.inside(|| {
        let root = shunt_sys::seqpacket::connect(socket.as_os_str().as_encoded_bytes()).expect("it listens");
        shunt_sys::seqpacket::send(&root, b"none", &[]).expect("there is room");
    });
    std::thread::sleep(Duration::from_millis(100));
    for who in [Who::User, Who::Container] {
        let stranger = Stranger::start(&broker, attacker(), who, "spy");
        assert_eq!(stranger.report, "at work: links 0, pairs 0, refused 0, bad 0, processes 0", "{who:?}");
    }
    let told = broker.status().expect("root is told everything");
    assert!(told.pairs_made > 0 && told.links > 0 && !told.bad_messages.is_empty(), "{told:?}");
    for (name, served) in victims.stop() {
        assert!(served.troubles.is_empty(), "{name}: {:?}", served.troubles);
    }
}

/// A receiver does not read memory into which a sender can punch holes. So it serves other senders,
/// and its time-outs hold. A sealed file cannot be punched, so its sender is served too.
#[test]
fn nobody_keeps_a_receiver_of_messages_waiting() {
    const ENOUGH: u32 = 200;
    let _turns = [turn(Who::User), turn(Who::Container)];
    let broker = Broker::start();
    for who in [Who::User, Who::Container] {
        let path = broker.place().join(MESSAGES);
        let mut receiver = Receiver::listen(&path, Options { mode: 0o666, ..Options::default() }).unwrap();
        let mut friend = Sender::connect(&path, Wait::Never).unwrap();
        let stranger = Stranger::start(&broker, attacker(), who, "punched-channel");
        let mut message = Message::new();
        let (mut friends, mut strangers, mut ended, mut time_outs) = (0, 0, 0, 0);
        let mut longest = Duration::ZERO;
        while friends < ENOUGH || strangers < ENOUGH || ended < ENOUGH || time_outs == 0 {
            if friends < ENOUGH {
                friend.send(b"friend", &[], Wait::Never).unwrap();
            }
            let start = Instant::now();
            let received = receiver.receive(&mut message, Wait::at_most(Duration::from_millis(1)));
            longest = longest.max(start.elapsed());
            match received {
                Ok(Event::Message { .. }) if message.bytes() == b"friend" => friends += 1,
                Ok(Event::Message { .. }) => strangers += 1,
                Ok(Event::Ended { cause: Cause::Misbehaved(why), .. }) => {
                    assert!(why.contains("not sealed against punching"), "{why}");
                    ended += 1;
                }
                Err(ReceiveError::TimedOut) => time_outs += 1,
                other => panic!("{other:?}"),
            }
        }
        eprintln!("punched-channel by {who:?}: {}; the longest wait {longest:?}", stranger.report);
    }
}
