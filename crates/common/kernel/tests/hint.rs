//! Tests that connections ask for hints and get answers in the options of their first segments, and
//! that peers and networks that know nothing of them do no harm. Needs root and nft.

mod group;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;

use group::Group;
use rustix::net::AddressFamily;
use shunt_kernel::hint::{Arrivals, Counts, Hint, Hints};
use shunt_netns::Net;
use shunt_sys::{accounted, identity};

const ANSWER: [u8; 16] = *b"sixteen bytes...";

/// The program, and a namespace that it watches.
struct Watching {
    net: Net,
    hints: Hints,
    arrivals: Arrivals,
    namespace: u64,
}

impl Watching {
    fn begin() -> Watching {
        let net = Net::new();
        net.words("ip address add 10.50.0.1/32 dev lo");
        net.words("ip address add fd00:50::1/128 dev lo nodad");
        let namespace = net.inside(|| {
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            identity::namespace(socket.as_fd()).unwrap()
        });
        let prefixes = [("10.50.0.0".parse().unwrap(), 16), ("fd00:50::".parse().unwrap(), 32)];
        let (mut hints, arrivals) = Hints::load(&prefixes).unwrap();
        hints.answer(ANSWER).unwrap();
        Watching { net, hints, arrivals, namespace }
    }

    fn connect(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let address = listener.local_addr().unwrap();
        let client = self.net.inside(|| TcpStream::connect(address)).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn listen(&self, address: &str) -> TcpListener {
        self.net.inside(|| TcpListener::bind(address)).unwrap()
    }
}

#[test]
fn a_watched_client_gets_the_answer_of_a_watched_server() {
    let mut it = Watching::begin();
    let watched = it.hints.watch(it.namespace, std::process::id()).unwrap().expect("a visible group");
    for host in ["10.50.0.1:0", "[fd00:50::1]:0"] {
        let listener = it.listen(host);
        let remote: SocketAddr = listener.local_addr().unwrap();
        let ends = it.connect(&listener);
        let local = ends.0.local_addr().unwrap();
        let hint = Hint { namespace: it.namespace, local, remote, answer: ANSWER };
        assert_eq!(it.arrivals.take(), Some(hint));
        // The same hint is passed on once in a second.
        let _more = [(); 4].map(|()| it.connect(&listener));
        assert_eq!(it.arrivals.take(), None);
    }
    // A socket of both families writes IPv4 addresses as mapped ones.
    let listener = it.listen("[::]:0");
    let port = listener.local_addr().unwrap().port();
    it.hints.answer([1; 16]).unwrap();
    let _client = it.net.inside(|| TcpStream::connect(("::ffff:10.50.0.1", port))).unwrap();
    let hint = it.arrivals.take().expect("one with another answer");
    assert_eq!((hint.remote, hint.answer), (SocketAddr::from(([10, 50, 0, 1], port)), [1; 16]));
    // Other addresses have no options.
    let before = it.hints.counts();
    let listener = it.listen("127.0.0.1:0");
    let _ends = it.connect(&listener);
    assert_eq!((it.arrivals.take(), it.hints.counts()), (None, before));
    assert_eq!(before, Counts { asked: 11, answered: 11, hints: 3, ..Counts::default() });

    let listener = it.listen("10.50.0.1:0");
    it.hints.unwatch(&watched);
    let _ends = it.connect(&listener);
    assert_eq!((it.arrivals.take(), it.hints.counts()), (None, before));
}

#[test]
fn only_the_groups_of_watched_programs_take_part() {
    let mut it = Watching::begin();
    let group = Group::create();
    let _watched = it.hints.watch(it.namespace, group.process.id()).unwrap().expect("a visible group");
    let directory = std::fs::File::open(&group.path).unwrap();
    let made = it.net.inside(|| accounted::sockets(directory.as_fd(), AddressFamily::INET, 2)).unwrap();
    let [listener, client]: [_; 2] = made.try_into().unwrap();
    rustix::net::bind(&listener, &SocketAddr::from(([10, 50, 0, 1], 0))).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let listener = TcpListener::from(listener);
    // A client of another group does not ask.
    let _other = it.net.inside(|| TcpStream::connect(listener.local_addr().unwrap())).unwrap();
    assert_eq!((it.arrivals.take(), it.hints.counts()), (None, Counts::default()));
    let client = TcpStream::from(client);
    client.set_nonblocking(false).unwrap();
    rustix::net::connect(&client, &listener.local_addr().unwrap()).unwrap();
    assert!(it.arrivals.take().is_some(), "{:?}", it.hints.counts());
}

#[test]
fn a_peer_without_the_program_answers_nothing() {
    let mut it = Watching::begin();
    let there = Net::new();
    Net::connect((&it.net, "wire", "10.50.1.1/24"), (&there, "wire", "10.50.1.2/24"));
    let _watched = it.hints.watch(it.namespace, std::process::id()).unwrap();
    let listener = there.inside(|| TcpListener::bind("10.50.1.2:0")).unwrap();
    let _ends = it.connect(&listener);
    assert_eq!(it.arrivals.take(), None);
    assert_eq!(it.hints.counts(), Counts { asked: 1, ..Counts::default() });
}

#[test]
fn a_socket_that_listens_already_answers_too() {
    let mut it = Watching::begin();
    let before = it.listen("10.50.0.1:0");
    let _watched = it.hints.watch(it.namespace, std::process::id()).unwrap();
    let _ends = it.connect(&before);
    assert_eq!(it.arrivals.take(), None);
    let existing = it.hints.existing().unwrap();
    it.net.inside(|| existing.run()).unwrap();
    let _ends = it.connect(&before);
    // Linux 6.12 and later.
    let counts = it.hints.counts();
    assert_eq!((it.arrivals.take().is_some(), counts.too_early), (true, 0), "{counts:?}");
}

/// Connects over a network that drops segments with such an option. The first connection waits for
/// its second SYN.
#[test]
fn a_network_that_drops_the_options_costs_one_retransmission() {
    for (flags, counts) in [
        ("syn", Counts { asked: 1, unanswered: 1, ..Counts::default() }),
        ("syn|ack", Counts { asked: 1, answered: 1, unanswered: 1, ..Counts::default() }),
    ] {
        let mut it = Watching::begin();
        let _watched = it.hints.watch(it.namespace, std::process::id()).unwrap();
        // Ten words have all options of Linux. Another option makes the header longer.
        it.net.words("nft add table ip t");
        it.net.run("nft", ["add chain ip t c { type filter hook input priority 0 ; }"]);
        let rule = format!("add rule ip t c tcp flags & (syn|ack) == {flags} tcp doff > 10 drop");
        it.net.run("nft", [rule]);
        let listener = it.listen("10.50.0.1:0");
        let _first = it.connect(&listener);
        let _later = [(); 4].map(|()| it.connect(&listener));
        assert_eq!(it.arrivals.take(), None);
        assert_eq!(it.hints.counts(), counts, "{flags}");
    }
}

/// A namespace has its share of hints, so that it does not keep user space busy.
#[test]
fn a_namespace_has_no_more_than_its_share_of_hints() {
    let mut it = Watching::begin();
    let _watched = it.hints.watch(it.namespace, std::process::id()).unwrap();
    let listener = it.listen("10.50.0.1:0");
    for round in 0..200 {
        it.hints.answer([round; 16]).unwrap();
        drop(it.connect(&listener));
    }
    let arrived = std::iter::from_fn(|| it.arrivals.take()).count() as u64;
    let counts = it.hints.counts();
    assert_eq!((arrived, counts.hints + counts.over), (counts.hints, 200));
    assert!(counts.over > 0, "{counts:?}");
}
