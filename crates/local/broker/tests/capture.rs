//! Captures: which clients may capture, what they see, and how the slots of a captured link are
//! handled.

mod common;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use common::{Broker, Process, SECOND, eventually, expect_hang_up, loopback, send_all, stranger};
use shunt_abi::control::{Capture, MAX_MESSAGE, Pair, Reply, Request, SeenEnd, SeenPair, SeenUnlink, Status};
use shunt_abi::geometry::{Geometry, LANE_FOLLOWED_OFFSET, MIN_RING_BYTES, RINGS_OFFSET, Side};
use shunt_abi::page::PAGE_BYTES;
use shunt_sys::mapping::Mapping;
use shunt_sys::view::View;
use shunt_sys::{Errno, seqpacket};

const PATIENCE: Duration = Duration::from_secs(20);

/// A client that captures.
struct Reader {
    socket: OwnedFd,
    of_all: bool,
}

impl Reader {
    fn of(broker: &Broker) -> Reader {
        let socket = stranger(broker);
        send_all(&socket, &Request::from(Capture { pad: 0 }).encode(), &[]);
        let mut reader = Reader { socket, of_all: false };
        let (Reply::Capturing(capturing), None) = reader.next() else { panic!("no answer") };
        reader.of_all = capturing.of_all == 1;
        reader
    }

    fn try_next(&self, patience: Duration) -> Option<(Reply, Option<OwnedFd>)> {
        let (mut buffer, deadline) = ([0; MAX_MESSAGE], Instant::now() + patience);
        loop {
            match seqpacket::recv(&self.socket, &mut buffer) {
                Ok((0, _)) | Err(Errno::CONNRESET) => panic!("the broker hung up"),
                Ok((len, mut fds)) => {
                    return Some((Reply::decode(&buffer[..len], fds.len()).unwrap(), fds.take_first()));
                }
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1))
                }
                Err(Errno::AGAIN) => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[track_caller]
    fn next(&self) -> (Reply, Option<OwnedFd>) {
        self.try_next(PATIENCE).expect("something to see")
    }

    #[track_caller]
    fn silence(&self) {
        let said = self.try_next(Duration::from_millis(200)).map(|(reply, _)| reply);
        assert_eq!(said, None);
    }

    #[track_caller]
    fn expect_link(&self, link: u64) -> OwnedFd {
        match self.next() {
            (Reply::SeenLink(seen), Some(memfd)) => {
                assert_eq!((seen.link, seen.ring_bytes), (link, MIN_RING_BYTES as u64));
                assert_eq!(seen.pids, [std::process::id(); 2]);
                assert!(seen.programs.iter().all(|name| name.starts_with(b"test\0")));
                memfd
            }
            (other, _) => panic!("expected a link, got {other:?}"),
        }
    }

    #[track_caller]
    fn expect_pair(&self) -> SeenPair {
        match self.next() {
            (Reply::SeenPair(pair), None) => pair,
            (other, _) => panic!("expected a pair, got {other:?}"),
        }
    }
}

/// Connects and pairs two processes. Returns the slot as each of them sees it.
fn connect_ends(one: &mut Process, two: &mut Process, ticket: u64) -> [Pair; 2] {
    let (client, server) = loopback("127.0.0.1");
    one.offer(ticket, &client);
    two.offer(ticket, &server);
    let mut pairs = [None, None];
    while pairs.iter().any(Option::is_none) {
        for (process, pair) in [&mut *one, &mut *two].into_iter().zip(&mut pairs) {
            if pair.is_none()
                && let Some((Reply::Pair(told), None)) = process.try_next(Duration::from_millis(20))
            {
                *pair = Some(told);
            }
        }
    }
    pairs.map(Option::unwrap)
}

fn release([one, two]: [(&Process, &Pair); 2]) {
    one.0.release(one.1);
    two.0.release(two.1);
}

#[test]
fn what_there_is_and_what_comes_is_told_with_its_end() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let under_way = connect_ends(&mut one, &mut two, 1);
    let reader = Reader::of(&broker);
    assert!(reader.of_all);
    let link = under_way[0].link;
    let memfd = reader.expect_link(link);
    let seen = reader.expect_pair();
    assert_eq!((seen.conn, seen.fresh), (under_way[0].conn, 0));
    assert_eq!(seen.cookies[under_way[0].side as usize], under_way[0].cookie);
    assert_eq!(seen.cookies[under_way[1].side as usize], under_way[1].cookie);
    assert_eq!(seen.seen_by(Side::A), seen.seen_by(Side::B));
    // The memory can be mapped for reading only.
    assert_eq!(Mapping::map(&memfd, RINGS_OFFSET).unwrap_err(), Errno::ACCESS);
    let view = View::map(memfd, RINGS_OFFSET).unwrap();
    let followed = |conn: u32, side| {
        let lane = Geometry::new(MIN_RING_BYTES).unwrap().lane_offset(conn as usize, side);
        view.half_word(lane + LANE_FOLLOWED_OFFSET).unwrap()
    };
    assert_eq!([Side::A, Side::B].map(|side| followed(seen.conn, side)), [1, 1]);

    let fresh = connect_ends(&mut one, &mut two, 2);
    let seen = reader.expect_pair();
    assert_eq!((seen.link, seen.conn, seen.fresh), (link, fresh[0].conn, 1));
    assert_eq!(followed(seen.conn, Side::A), 1);

    // During a capture a slot is used at most once, even if it is free.
    release([(&one, &under_way[0]), (&two, &under_way[1])]);
    let ended = SeenEnd { link, conn: under_way[0].conn, pad: 0 };
    assert_eq!(reader.next().0, ended.into());
    let next = connect_ends(&mut one, &mut two, 3);
    assert_eq!(next[0].conn, fresh[0].conn + 1);
    assert_eq!(reader.expect_pair().conn, next[0].conn);
    drop(reader);
    eventually(|| followed(next[0].conn, Side::B) == 0);
    assert_eq!(connect_ends(&mut one, &mut two, 4)[0].conn, under_way[0].conn);
}

#[test]
fn a_link_that_is_new_is_told_with_its_first_connection_and_when_it_is_no_more() {
    let broker = Broker::start();
    let (first, second) = (Reader::of(&broker), Reader::of(&broker));
    let (mut one, mut two) = (broker.process(), broker.process());
    let pairs = connect_ends(&mut one, &mut two, 1);
    let link = pairs[0].link;
    for reader in [&first, &second] {
        reader.expect_link(link);
        assert_eq!(reader.expect_pair().fresh, 1);
    }
    drop(first);
    // Both ends exit.
    drop((one, two));
    assert_eq!(second.next().0, SeenEnd { link, conn: pairs[0].conn, pad: 0 }.into());
    assert_eq!(second.next().0, SeenUnlink { link }.into());
    second.silence();
}

#[test]
fn rings_are_left_as_they_are_as_long_as_somebody_reads_them() {
    let broker = Broker::start_with(|config| config.ring_bytes = 4 * MIN_RING_BYTES);
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    two.offer(1, &server);
    let (link, memory) = one.expect_link();
    two.expect_link();
    let pairs = [one.expect_pair(), two.expect_pair()];
    let geometry = Geometry::new(4 * MIN_RING_BYTES).unwrap();
    let at = geometry.ring_offset(pairs[0].conn as usize, Side::A) + 2 * MIN_RING_BYTES;
    memory.word(at).unwrap().store(7, Relaxed);
    let socket = stranger(&broker);
    send_all(&socket, &Request::from(Capture { pad: 0 }).encode(), &[]);
    let reader = Reader { socket, of_all: true };
    while !matches!(reader.next().0, Reply::SeenPair(_)) {}
    release([(&one, &pairs[0]), (&two, &pairs[1])]);
    // The link is dropped after a while, and its content stays readable.
    while reader.next().0 != (SeenUnlink { link: link.link }).into() {}
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(memory.word(at).unwrap().load(Relaxed), 7);
}

#[test]
fn whoever_reads_along_says_nothing_more_and_needs_no_hello() {
    let broker = Broker::start_with(|config| config.limits.hello_within = SECOND);
    let reader = Reader::of(&broker);
    std::thread::sleep(SECOND * 3 / 2);
    let (mut one, mut two) = (broker.process(), broker.process());
    connect_ends(&mut one, &mut two, 1);
    reader.next();
    send_all(&reader.socket, &Request::from(Status { pad: 0 }).encode(), &[]);
    expect_hang_up(&reader.socket);
    assert_eq!(broker.bad("after_capture"), 1);
}

#[test]
fn as_many_read_along_as_there_is_room_for() {
    let broker = Broker::start_with(|config| config.limits.captures = 2);
    let readers = [Reader::of(&broker), Reader::of(&broker)];
    let third = stranger(&broker);
    send_all(&third, &Request::from(Capture { pad: 0 }).encode(), &[]);
    expect_hang_up(&third);
    drop(readers);
    eventually(|| {
        let socket = stranger(&broker);
        send_all(&socket, &Request::from(Capture { pad: 0 }).encode(), &[]);
        let mut buffer = [0; MAX_MESSAGE];
        eventually(|| !matches!(seqpacket::recv(&socket, &mut buffer), Err(Errno::AGAIN)));
        broker.bad("capture_limit") >= 1 && !seqpacket::has_hung_up(&socket)
    });
}

/// A program that captures for a while. It prints the number of links and connections, and whether
/// it may see all.
const LOOK: &str = "
import socket, struct, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(struct.pack('<IHHQ', 0x544e4853, int(sys.argv[2]), 17, 0))
s.settimeout(0.5)
kinds = []
try:
    while True:
        message, fds, _, _ = socket.recv_fds(s, 4096, 4)
        if not message:
            kinds.append('hung up')
            break
        kind = struct.unpack_from('<IHH', message)[2]
        kinds.append('all' if kind == 17 and message[8] else {17: 'own', 18: 'link', 19: 'pair'}.get(kind, kind))
except TimeoutError:
    pass
print(*kinds, flush=True)
";

/// Runs [`LOOK`] with these words before the command, and returns its output.
fn shown(broker: &Broker, words: &[&str]) -> String {
    let mut line = words.to_vec();
    let (socket, version) = (broker.socket(), shunt_abi::VERSION.to_string());
    line.extend(["/usr/bin/python3", "-c", LOOK, socket.to_str().unwrap(), &version]);
    let output = Command::new(line[0]).args(&line[1..]).stderr(Stdio::inherit()).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Starts a system broker with a connection between two programs of root. Needs root.
fn system() -> (Broker, Process, Process) {
    let broker = Broker::start_for_all(|_| {});
    let socket = broker.socket();
    std::fs::set_permissions(socket, PermissionsExt::from_mode(0o666)).unwrap();
    let (mut one, mut two) = (broker.process(), broker.process());
    connect_ends(&mut one, &mut two, 1);
    (broker, one, two)
}

#[test]
fn root_of_the_host_sees_everything_and_other_users_nothing() {
    let (broker, _one, _two) = system();
    assert_eq!(shown(&broker, &["env"]), "all link pair");
    assert_eq!(shown(&broker, &["setpriv", "--reuid", "65534", "--clear-groups"]), "own");
    // A different user that keeps root's capabilities is not root.
    let kept = [
        "setpriv",
        "--reuid",
        "65534",
        "--clear-groups",
        "--inh-caps",
        "+sys_ptrace",
        "--ambient-caps",
        "+sys_ptrace",
    ];
    assert_eq!(shown(&broker, &kept), "own");
}

#[test]
fn root_of_a_container_sees_nothing_of_others() {
    let (broker, _one, _two) = system();
    // A separate network namespace; the host's network with a separate pid namespace; a separate
    // user namespace; a reduced set of capabilities.
    assert_eq!(shown(&broker, &["unshare", "--net"]), "own");
    assert_eq!(shown(&broker, &["unshare", "--pid", "--fork", "--mount-proc"]), "own");
    assert_eq!(shown(&broker, &["unshare", "--user", "--map-root-user"]), "own");
    let less = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"];
    assert_eq!(shown(&broker, &less), "own link pair", "it may look into its own");
}

/// A program with a connection to itself, and one to a port in its arguments. It prints a line when
/// it has offered all.
const TALK: &str = "
import fcntl, os, socket, struct, sys, threading
path, version, page_bytes, port = sys.argv[1], *map(int, sys.argv[2:])
page = os.memfd_create('shunt-page', os.MFD_ALLOW_SEALING)
os.ftruncate(page, page_bytes)
fcntl.fcntl(page, 1033, 0x10 | 7)
broker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
broker.connect(path)
def say(kind, body, fd):
    socket.send_fds(broker, [struct.pack('<IHH', 0x544e4853, version, kind) + body], [fd])
say(1, b'test'.ljust(32, b'\\0'), page)
def answer():
    while True:
        told, fds, _, _ = socket.recv_fds(broker, 512, 1)
        if not told:
            return
        for fd in fds:
            os.close(fd)
        if struct.unpack_from('<H', told, 6)[0] == 2:
            link, _, _, side = struct.unpack_from('<QQQI', told, 8)
            broker.send(struct.pack('<IHHQII', 0x544e4853, version, 8, link, side, 1))
threading.Thread(target=answer, daemon=True).start()
listener = socket.create_server(('127.0.0.1', 0))
one = socket.create_connection(listener.getsockname())
two, _ = listener.accept()
far = socket.create_connection(('127.0.0.1', port))
for ticket, end in enumerate([one, two, far]):
    octets = [b'\\0' * 10 + b'\\xff\\xff' + socket.inet_aton(at[0]) for at in (end.getsockname(), end.getpeername())]
    ports = [at[1] for at in (end.getsockname(), end.getpeername())]
    say(2, struct.pack('<Q16s16sHHI', ticket, *octets, *ports, 0), end.fileno())
print('ready', flush=True)
sys.stdin.read()
";

#[test]
fn a_user_sees_what_is_of_his_own_at_both_ends() {
    let (broker, mut root, _two) = system();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let nobody = ["setpriv", "--reuid", "65534", "--clear-groups"];
    let mut talk = Command::new(nobody[0])
        .args(&nobody[1..])
        .args(["/usr/bin/python3", "-c", TALK])
        .arg(broker.socket())
        .args([shunt_abi::VERSION.to_string(), PAGE_BYTES.to_string(), port.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (server, _) = listener.accept().unwrap();
    BufReader::new(talk.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    root.offer(2, &server);
    while !matches!(root.next().0, Reply::Pair(_)) {}
    assert_eq!(shown(&broker, &nobody), "own link pair");
    assert_eq!(shown(&broker, &["setpriv", "--reuid", "65533", "--clear-groups"]), "own");
    assert_eq!(shown(&broker, &["env"]), "all link pair link pair link pair");
    drop(talk.stdin.take());
    assert!(talk.wait().unwrap().success());
}

#[test]
fn what_has_become_his_is_not_his_own() {
    let (broker, _one, _two) = system();
    let connect = || {
        // SAFETY: changes the credentials of this thread and nothing else.
        let done = unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
        assert_eq!(done, 0, "this test needs root");
        broker.process()
    };
    let as_nobody = || std::thread::scope(|threads| threads.spawn(connect).join().unwrap());
    let (mut one, mut two) = (as_nobody(), as_nobody());
    connect_ends(&mut one, &mut two, 1);
    assert_eq!(shown(&broker, &["setpriv", "--reuid", "65534", "--clear-groups"]), "own");
}

/// A program that captures until it has no input any more. It prints a line for each message, and
/// changes its user when it is asked to.
const READ: &str = "
import os, select, socket, struct, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(struct.pack('<IHHQ', 0x544e4853, int(sys.argv[2]), 17, 0))
while True:
    ready, _, _ = select.select([s, sys.stdin], [], [])
    if sys.stdin in ready:
        if not sys.stdin.readline():
            break
        os.setresuid(65534, 65534, 65534)
        print('changed', flush=True)
    if s in ready:
        message, fds, _, _ = socket.recv_fds(s, 4096, 4)
        for fd in fds:
            os.close(fd)
        if not message:
            print('hung up', flush=True)
            break
        kind, link = struct.unpack_from('<H', message, 6)[0], struct.unpack_from('<Q', message, 8)[0]
        print(*{17: ['own'], 18: ['link', link], 19: ['pair', link], 21: ['unlink', link]}.get(kind, [kind]), flush=True)
";

/// A running [`READ`] of root, which may read root's own connections but not everything.
struct OwnReader {
    child: std::process::Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl OwnReader {
    fn of(broker: &Broker) -> OwnReader {
        let (socket, version) = (broker.socket(), shunt_abi::VERSION.to_string());
        let mut child = Command::new("setpriv")
            .args(["--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"])
            .args(["/usr/bin/python3", "-u", "-c", READ, socket.to_str().unwrap(), &version])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut reader = OwnReader { child, lines };
        reader.expect("own");
        reader
    }

    #[track_caller]
    fn expect(&mut self, line: &str) {
        let mut read = String::new();
        self.lines.read_line(&mut read).unwrap();
        assert_eq!(read.trim(), line);
    }

    /// Has the program change its user.
    fn change(&mut self) {
        use std::io::Write;
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.expect("changed");
    }

    /// Ends the program. It must have printed nothing more.
    #[track_caller]
    fn end(mut self) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut self.lines, &mut rest).unwrap();
        assert!(self.child.wait().unwrap().success());
        assert_eq!(rest, "");
    }
}

/// Receives messages until the one that asks to leave a link.
#[track_caller]
fn expect_vacate(process: &mut Process, link: u64) {
    loop {
        if let Reply::Vacate(vacate) = process.next().0 {
            return assert_eq!(vacate.link, link);
        }
    }
}

#[test]
fn reader_that_has_changed_its_user_is_shown_nothing_new() {
    let broker = Broker::start_for_all(|_| {});
    let (mut one, mut two) = (broker.process(), broker.process());
    let link = connect_ends(&mut one, &mut two, 1)[0].link;
    let mut reader = OwnReader::of(&broker);
    reader.expect(&format!("link {link}"));
    reader.expect(&format!("pair {link}"));
    let pairs = connect_ends(&mut one, &mut two, 2);
    assert_eq!(pairs[0].link, link);
    reader.expect(&format!("pair {link}"));
    // It has the memory of this link, so later connections get another, and present ones leave it.
    reader.change();
    let next = connect_ends(&mut one, &mut two, 3);
    assert_ne!(next[0].link, link);
    reader.expect(&format!("unlink {link}"));
    expect_vacate(&mut one, link);
    expect_vacate(&mut two, link);
    release([(&one, &next[0]), (&two, &next[1])]);
    // No capture reads this one, so its slot is free again.
    assert_eq!(connect_ends(&mut one, &mut two, 4)[0].conn, next[0].conn);
    reader.end();
}

#[test]
fn connections_of_a_process_that_has_changed_its_user_are_shown_no_more() {
    let broker = Broker::start_for_all(|_| {});
    let (mut one, mut two, mut three) = (broker.process(), broker.process(), broker.process());
    let link = connect_ends(&mut one, &mut two, 1)[0].link;
    let other = connect_ends(&mut two, &mut three, 2)[0].link;
    let mut reader = OwnReader::of(&broker);
    for link in [link, other] {
        reader.expect(&format!("link {link}"));
        reader.expect(&format!("pair {link}"));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the call as such, of this thread alone.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
            assert_eq!(done, 0, "needs root");
            // By a reference that may cross threads.
            let one = &mut one;
            one.offer(3, &loopback("127.0.0.1").0);
        });
    });
    reader.expect(&format!("unlink {link}"));
    expect_vacate(&mut two, link);
    assert_eq!(connect_ends(&mut two, &mut three, 4)[0].link, other);
    reader.expect(&format!("pair {other}"));
    reader.end();
}
