//! Start, stop and restart: one broker per socket, and no files left behind.

mod common;

use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::Ordering::Release;
use std::time::Duration;

use common::{Broker, Process, SECOND, eventually, loopback, path_bytes, spawn};
use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use shunt_abi::control::Announce;
use shunt_abi::page::{EntryCopy, Which};
use shunt_abi::reason::Reason;
use shunt_abi::status::Moved;
use shunt_broker::{Config, Error, ListenError, Mode, StatusError, status, status_with_latency};
use shunt_sys::seqpacket;
use tokio::sync::oneshot;

fn ended(config: Config) -> Result<(), Error> {
    spawn(config, std::future::pending::<()>()).join().unwrap()
}

#[test]
fn a_clean_stop_leaves_no_file() {
    let mut broker = Broker::start();
    let process = broker.process();
    assert_eq!(broker.socket().metadata().unwrap().mode() & 0o777, 0o600);
    broker.stop().unwrap();
    let left: Vec<_> = std::fs::read_dir(broker.socket().parent().unwrap()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    common::expect_hang_up(&process.socket);
    assert!(matches!(status(broker.socket()), Err(StatusError::NoBroker { .. })));
    // Another broker can start at this path.
    broker.run(Config::new(broker.socket(), Mode::User));
    Process::connect(&broker.socket());
}

#[test]
fn a_second_broker_says_who_is_there() {
    let mut broker = Broker::start();
    for _ in 0..3 {
        match ended(Config::new(broker.socket(), Mode::User)) {
            Err(Error::Listen(ListenError::AlreadyRunning { pid, path })) => {
                assert_eq!((pid, path), (std::process::id(), broker.socket()));
            }
            other => panic!("{other:?}"),
        }
    }
    // The failed attempts have not disturbed the first broker.
    broker.process();
    broker.stop().unwrap();
}

#[test]
fn a_stale_socket_is_replaced_and_a_foreign_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("broker.sock");
    let bound = || {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        socket
    };
    // A killed broker leaves a socket file without a listener, and an unlocked lock file.
    drop(bound());
    std::fs::write(directory.path().join("broker.sock.pid"), "4194304\n").unwrap();
    let mut config = Config::new(&path, Mode::User);
    config.idle_exit = Some(Duration::from_millis(50));
    assert!(matches!(ended(config), Ok(())));
    assert!(!path.exists());
    // Another process listens without holding the lock.
    let foreign = bound();
    listen(&foreign, 1).unwrap();
    match ended(Config::new(&path, Mode::User)) {
        Err(Error::Listen(ListenError::AlreadyRunning { pid, .. })) => assert_eq!(pid, std::process::id()),
        other => panic!("{other:?}"),
    }
    assert!(path.exists());
    drop(foreign);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(
        ended(Config::new(&path, Mode::User)),
        Err(Error::Listen(ListenError::NotASocket { .. }))
    ));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

/// Returns the configuration of a broker in a directory that every user can enter. It stops when it
/// is idle.
fn for_all(path: &Path) -> Config {
    let mut config = Config::new(path, Mode::System);
    config.idle_exit = Some(Duration::from_millis(50));
    config
}

/// Makes a file that every user can read, and therefore lock.
fn make_for_all(path: &Path, content: &str) {
    std::fs::write(path, content).unwrap();
    std::fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
}

/// Locks a file, as any process that can read it may. The lock is held until the returned file is
/// dropped.
fn lock_as_stranger(path: &Path) -> File {
    let stranger = File::open(path).unwrap();
    flock(&stranger, FlockOperation::NonBlockingLockExclusive).unwrap();
    stranger
}

#[test]
fn no_stranger_keeps_a_killed_broker_from_starting_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("broker.sock");
    let old_lock = directory.path().join("broker.sock.lock");
    // A killed broker of an older version leaves a lock file that every user can read and lock.
    make_for_all(&old_lock, "4194304\n");
    let _stranger = lock_as_stranger(&old_lock);
    assert!(matches!(ended(for_all(&path)), Ok(())));
    assert!(!old_lock.exists());
    // Only the user of a running broker can open its lock file, which is not in the directory that
    // containers mount.
    let path = directory.path().join("deeper/broker.sock");
    let lock = directory.path().join("deeper.broker.sock.pid");
    let mut config = for_all(&path);
    config.idle_exit = None;
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = spawn(config, async { drop(stopped.await) });
    eventually(|| seqpacket::connect(path_bytes(&path)).is_ok());
    assert_eq!(lock.metadata().unwrap().mode() & 0o777, 0o600);
    let shared = std::fs::read_dir(path.parent().unwrap()).unwrap();
    assert_eq!(shared.map(|file| file.unwrap().path()).collect::<Vec<_>>(), [path]);
    drop(stop);
    thread.join().unwrap().unwrap();
}

#[test]
fn a_lock_that_others_can_open_is_replaced_or_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("broker.sock");
    let lock = directory.path().join("broker.sock.pid");
    make_for_all(&lock, "");
    assert!(matches!(ended(for_all(&path)), Ok(())), "nobody holds it");
    make_for_all(&lock, "");
    let _stranger = lock_as_stranger(&lock);
    match ended(for_all(&path)) {
        Err(Error::Listen(error @ ListenError::LockHeld { .. })) => {
            assert!(error.to_string().contains("broker.sock.pid"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_broker_that_is_restarted_pairs_again() {
    let mut broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    two.offer(1, &server);
    let (ours, theirs) = (one.expect_link().1, two.expect_link().1);
    one.expect_pair();
    broker.stop().unwrap();
    // The link outlives the broker that made it.
    ours.word(8).unwrap().store(7, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(theirs.word(8).unwrap().load(std::sync::atomic::Ordering::Relaxed), 7);
    broker.run(Config::new(broker.socket(), Mode::User));
    let (mut one, mut two) = (broker.process(), broker.process());
    one.offer(1, &client);
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    assert_eq!(one.expect_pair().conn, two.expect_pair().conn);
}

#[test]
fn a_broker_whose_directory_is_removed_listens_again_and_pairs_old_clients_with_new_ones() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("runtime");
    let path = place.join("broker.sock");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let thread = spawn(Config::new(&path, Mode::User), async { drop(stopped.await) });
    eventually(|| seqpacket::connect(path_bytes(&path)).is_ok());
    let mut old = Process::connect(&path);
    let mut news = Vec::new();
    // Removes the directory, then only the socket, then the directory again, which the test itself
    // makes anew.
    for again in 0..3 {
        match again {
            1 => std::fs::remove_file(&path).unwrap(),
            _ => std::fs::remove_dir_all(&place).unwrap(),
        }
        if again == 2 {
            std::fs::create_dir(&place).unwrap();
        }
        eventually(|| seqpacket::connect(path_bytes(&path)).is_ok());
        let mut new = Process::connect(&path);
        let ends = loopback("127.0.0.1");
        old.offer(again, &ends.0);
        new.offer(again, &ends.1);
        old.expect_link();
        new.expect_link();
        assert_eq!(old.expect_pair().conn, new.expect_pair().conn);
        news.push(new);
    }
    stop.send(()).unwrap();
    thread.join().unwrap().unwrap();
    let left: Vec<_> = std::fs::read_dir(&place).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_broker_ends_where_another_has_its_place_and_leaves_that_alone() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("runtime");
    let path = place.join("broker.sock");
    let first = spawn(Config::new(&path, Mode::User), std::future::pending::<()>());
    eventually(|| seqpacket::connect(path_bytes(&path)).is_ok());
    let old = Process::connect(&path);
    // Usually the second broker has the path before the first one checks. If not, the first one
    // listens there again.
    let mut second = None;
    while second.is_none() {
        std::fs::remove_dir_all(&place).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let rival = spawn(Config::new(&path, Mode::User), async { drop(stopped.await) });
        eventually(|| rival.is_finished() || first.is_finished());
        second = first.is_finished().then_some((rival, stop));
    }
    let (second, stop) = second.expect("it was waited for");
    first.join().unwrap().unwrap();
    common::expect_hang_up(&old.socket);
    // The socket and the lock of the second broker are untouched.
    Process::connect(&path);
    assert!(matches!(
        ended(Config::new(&path, Mode::User)),
        Err(Error::Listen(ListenError::AlreadyRunning { .. }))
    ));
    stop.send(()).unwrap();
    second.join().unwrap().unwrap();
}

#[test]
fn a_broker_that_cannot_listen_again_serves_whom_it_has_until_it_can() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("runtime");
    let path = place.join("broker.sock");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let thread = spawn(Config::new(&path, Mode::User), async { drop(stopped.await) });
    eventually(|| seqpacket::connect(path_bytes(&path)).is_ok());
    let (mut one, mut two) = (Process::connect(&path), Process::connect(&path));
    std::fs::remove_dir_all(&place).unwrap();
    std::fs::write(&place, "in the way").unwrap();
    let ends = loopback("127.0.0.1");
    one.offer(1, &ends.0);
    two.offer(1, &ends.1);
    one.expect_link();
    two.expect_link();
    assert_eq!(std::fs::read_to_string(&place).unwrap(), "in the way");
    std::fs::remove_file(&place).unwrap();
    eventually(|| seqpacket::connect(path_bytes(&path)).is_ok());
    stop.send(()).unwrap();
    thread.join().unwrap().unwrap();
}

#[test]
fn an_idle_broker_stops_but_not_under_a_client() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("deeper/broker.sock");
    let mut config = Config::new(&path, Mode::User);
    config.idle_exit = Some(SECOND);
    let thread = spawn(config, std::future::pending::<()>());
    eventually(|| seqpacket::connect(path_bytes(&path)).is_ok());
    assert_eq!(path.parent().unwrap().metadata().unwrap().mode() & 0o777, 0o700);
    let mut process = Process::connect(&path);
    std::thread::sleep(SECOND * 3 / 2);
    process.silence();
    assert!(!thread.is_finished());
    drop(process);
    thread.join().unwrap().unwrap();
    assert!(!path.exists());
}

#[test]
fn a_socket_from_activation_is_used_and_left() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("broker.sock");
    let made = |kind| {
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 8).unwrap();
        socket
    };
    let mut config = Config::new(&path, Mode::System);
    config.listener = Some(made(SocketType::SEQPACKET));
    config.idle_exit = Some(SECOND);
    let thread = spawn(config, std::future::pending::<()>());
    Process::connect(&path).silence();
    thread.join().unwrap().unwrap();
    assert!(path.exists(), "the file belongs to whoever made it");
    std::fs::remove_file(&path).unwrap();
    let mut config = Config::new(&path, Mode::System);
    config.listener = Some(made(SocketType::STREAM));
    assert!(matches!(ended(config), Err(Error::Listen(ListenError::Activation))));
}

#[test]
fn impossible_configurations_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = Config::new(directory.path().join("broker.sock"), Mode::User);
    config.ring_bytes = 5000;
    assert!(matches!(ended(config), Err(Error::RingBytes(5000))));
    let long = directory.path().join("x".repeat(120));
    assert!(matches!(ended(Config::new(long, Mode::User)), Err(Error::Listen(ListenError::TooLong { .. }))));
    let nowhere = Config::new("/nonexistent/deep/broker.sock", Mode::User);
    assert!(matches!(ended(nowhere), Err(Error::Listen(ListenError::Io { .. }))));
}

#[test]
fn clients_are_bounded() {
    let broker = Broker::start_with(|config| config.limits.clients = 3);
    let (one, _two, _three) = (broker.process(), broker.process(), broker.process());
    assert!(matches!(status(broker.socket()), Err(StatusError::HungUp)));
    drop(one);
    eventually(|| status(broker.socket()).is_ok());
}

#[test]
fn a_connection_without_a_hello_ends() {
    let broker = Broker::start_with(|config| config.limits.hello_within = SECOND);
    let mut process = broker.process();
    common::expect_hang_up(&common::stranger(&broker));
    process.silence();
}

#[test]
fn the_page_counts_what_the_broker_has_dealt_with() {
    let broker = Broker::start();
    let mut process = broker.process();
    let taken = |process: &Process| process.board().taken.load(std::sync::atomic::Ordering::Acquire);
    // The hello counts as one message.
    eventually(|| taken(&process) == 1);
    process.say(Announce { pad: 0 }, &[]);
    eventually(|| taken(&process) == 2);
    let (reader, writer) = std::io::pipe().unwrap();
    process.offer(7, &writer);
    drop(writer);
    eventually(|| taken(&process) == 3);
    process.expect_refusal(7, Reason::NotTcp);
    // The message counts only after its descriptor is closed, or just before.
    assert_eq!(std::io::Read::read(&mut { reader }, &mut [0; 1]).unwrap(), 0);
}

/// Bytes are counted under the reason in force when they were sent. They stay counted after their
/// connection and its process have ended.
#[test]
fn bytes_of_what_has_ended_are_still_counted() {
    let broker = Broker::start();
    let process = broker.process();
    let page = process.page.page().unwrap();
    let address = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
    let transports = (Reason::PeerNotOffered as u64) << 16 | (Reason::IoUring as u64) << 32;
    page.entries[0].publish(&EntryCopy {
        cookie: 1,
        local: address,
        remote: address,
        transports,
        tcp_sent: 100,
        tcp_received: 30,
        shm_sent: 1000,
        ..EntryCopy::default()
    });
    page.rows.store(1, Release);
    let expected =
        Moved { shm: 1000, tcp: [("peer_not_offered".to_owned(), 100), ("io_uring".to_owned(), 30)].into() };
    assert_eq!(broker.status().totals.bytes, expected);
    // The connection continues on shared memory.
    page.count_tcp(&page.entries[0], Which::Sent);
    page.entries[0].transports.store(1 | transports & 0xffff << 32, Release);
    assert_eq!(broker.status().totals.bytes, expected);
    drop(process);
    eventually(|| broker.status().processes.is_empty());
    assert_eq!(broker.status().totals.bytes, expected);
}

/// A killed `shunt top` does not end its wish.
#[test]
fn a_wish_for_latencies_ends_by_itself_and_leaves_messages_alone() {
    let broker = Broker::start();
    let mut process = broker.process();
    assert!(!process.is_latency_wanted());
    status(broker.socket()).unwrap();
    assert!(!process.is_latency_wanted(), "an ordinary status asks for none");
    status_with_latency(broker.socket()).unwrap();
    assert!(process.is_latency_wanted());
    // `next` checks that the board announces the message.
    let (reader, _writer) = std::io::pipe().unwrap();
    process.offer(7, &reader);
    process.expect_refusal(7, Reason::NotTcp);
    assert!(process.is_latency_wanted());
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while process.is_latency_wanted() {
        assert!(std::time::Instant::now() < deadline, "the wish does not end");
        std::thread::sleep(Duration::from_millis(100));
    }
    process.offer(8, &reader);
    process.expect_refusal(8, Reason::NotTcp);
}
