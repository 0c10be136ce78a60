//! Tests of relays between two sites: intercepted connections, forwards, and failures on the path.
//! Needs root, nftables and iproute2.

#[allow(dead_code, reason = "what is not of relays is another test's")]
#[path = "common/dashboard.rs"]
mod dashboard;
#[path = "relay/encrypted.rs"]
mod encrypted;
#[path = "relay/lab.rs"]
mod lab;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lab::{EXIT, LIMIT, Lab, SERVER, SERVER6, Site, await_until, edge, receive, sample, send, with_limits};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getrlimit, kill_process, kill_process_group, setrlimit,
};
use socket2::SockRef;

fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Returns the error of a read that must fail.
fn failure(mut stream: &TcpStream) -> ErrorKind {
    let mut byte = [0; 1];
    match stream.read(&mut byte) {
        Err(error) => error.kind(),
        Ok(count) => panic!("{count} bytes instead of an error"),
    }
}

/// Returns the error of a connection that must fail. A reset may arrive before connect has
/// returned.
fn unhappy(connected: std::io::Result<TcpStream>) -> ErrorKind {
    connected.map_or_else(|error| error.kind(), |stream| failure(&stream))
}

/// Sends in both directions concurrently, several times as much as all buffers on the path hold.
/// The two streams end one after the other.
fn exchange(client: &TcpStream, server: &TcpStream, length: usize) {
    let (up, down) = (sample(length, 1), sample(length, 2));
    std::thread::scope(|scope| {
        scope.spawn(|| send(client, &up).unwrap());
        scope.spawn(|| send(server, &down).unwrap());
        let received = scope.spawn(|| receive(server).unwrap());
        assert!(receive(client).unwrap() == down, "what the server sent");
        assert!(received.join().unwrap() == up, "what the client sent");
    });
}

#[test]
fn bytes_arrive_in_every_mode_and_on_every_data_path() {
    for mode in ["early", "faithful", "late"] {
        let lab = Lab::with_relays(&format!("mode = '{mode}'"));
        for data in ["auto", "splice", "copy"] {
            for site in [Site::Edge, Site::Exit] {
                assert!(lab.ask(site, &["set", &format!("data={data}")]).status.success());
            }
            for address in [format!("{SERVER}:80"), format!("[{SERVER6}]:80")] {
                let listener = lab.listen(&address);
                let (client, server) = lab.pair(&listener);
                // The server sees the exit's address, and the client sees the server's.
                assert_eq!(client.peer_addr().unwrap().to_string(), address);
                assert_ne!(server.peer_addr().unwrap().ip(), client.local_addr().unwrap().ip());
                exchange(&client, &server, 8 << 20);
            }
        }
        let connected = format!("mode=\"{mode}\",verdict=\"connected\"");
        lab.await_counter(Site::Edge, "connections_total", &connected, 6);
        assert_eq!(lab.counter(Site::Edge, "bytes_total", "direction=\"up\""), 6 * (8 << 20));
    }
}

#[test]
fn small_messages_go_to_and_fro() {
    let lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (mut client, mut server) = lab.pair(&listener);
    for round in 0..500 {
        let message = sample(1 + round * 7 % 900, round as u64);
        let mut got = vec![0; message.len()];
        client.write_all(&message).unwrap();
        server.read_exact(&mut got).unwrap();
        server.write_all(&got).unwrap();
        client.read_exact(&mut got).unwrap();
        assert_eq!(got, message);
    }
}

#[test]
fn the_server_may_speak_first() {
    let lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    send(&server, b"220 ready").unwrap();
    assert_eq!(receive(&client).unwrap(), b"220 ready");
}

#[test]
fn each_side_may_end_its_stream_alone() {
    let lab = Lab::with_relays("");
    check_ends(&lab, &lab.listen(&format!("{SERVER}:80")));
}

fn check_ends(lab: &Lab, listener: &TcpListener) {
    let (client, server) = lab.pair(listener);
    send(&client, b"question").unwrap();
    assert_eq!(receive(&server).unwrap(), b"question");
    std::thread::sleep(Duration::from_millis(100));
    send(&server, b"answer").unwrap();
    assert_eq!(receive(&client).unwrap(), b"answer");
    let (client, server) = lab.pair(listener);
    send(&server, b"bye").unwrap();
    assert_eq!(receive(&client).unwrap(), b"bye");
    send(&client, b"still here").unwrap();
    assert_eq!(receive(&server).unwrap(), b"still here");
    await_until(|| lab.status(Site::Exit)["open-connections"] == 0, || lab.log(Site::Exit));
}

#[test]
fn a_reset_is_passed_on_in_every_phase_and_after_what_was_sent() {
    for mode in ["early", "faithful", "late"] {
        let lab = Lab::with_relays(&format!("mode = '{mode}'"));
        check_resets(&lab, &lab.listen(&format!("{SERVER}:80")), mode);
    }
}

fn check_resets(lab: &Lab, listener: &TcpListener, mode: &str) {
    // No side has sent anything yet.
    let (client, server) = lab.pair(listener);
    reset(client);
    assert_eq!(failure(&server), ErrorKind::ConnectionReset);
    let (client, server) = lab.pair(listener);
    reset(server);
    assert_eq!(failure(&client), ErrorKind::ConnectionReset);
    // Many bytes are in flight. All of them must arrive before the reset.
    let (client, mut server) = lab.pair(listener);
    let page = sample(300_000, 3);
    server.write_all(&page).unwrap();
    let mut got = vec![0; page.len()];
    (&client).read_exact(&mut got).unwrap();
    assert!(got == page);
    reset(server);
    assert_eq!(failure(&client), ErrorKind::ConnectionReset);
    // The other end has already ended its stream.
    let (client, server) = lab.pair(listener);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive(&server).unwrap(), b"");
    reset(server);
    assert_eq!(failure(&client), ErrorKind::ConnectionReset);
    // The server rejects the request before it has read it completely, as web servers do.
    let (client, mut server) = lab.pair(listener);
    (&client).write_all(&sample(200_000, 4)).unwrap();
    server.read_exact(&mut [0; 1]).unwrap();
    server.write_all(b"413").unwrap();
    drop(server);
    let mut answer = [0; 3];
    (&client).read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"413");
    assert_eq!(failure(&client), ErrorKind::ConnectionReset);
    await_until(|| lab.status(Site::Edge)["open-connections"] == 0, || lab.log(Site::Edge));
    // On a faithful route, the relay accepts no client before the target has answered.
    if mode != "faithful" {
        check_reset_before_target(lab);
    }
}

/// The client disappears before the target has answered. The exit learns this when it sends its
/// verdict to the edge.
fn check_reset_before_target(lab: &Lab) {
    let listener = lab.listen(&format!("{SERVER}:83"));
    lab.server.run(
        "nft",
        ["table inet late { chain in { type filter hook input priority 0; tcp dport 83 drop; }; }"],
    );
    reset(lab.connect(listener.local_addr().unwrap()).unwrap());
    await_until(|| lab.status(Site::Edge)["open-connections"] == 0, || lab.log(Site::Edge));
    lab.server.run("nft", ["delete table inet late"]);
    // The target's next SYN gets through.
    let (server, _) = listener.accept().unwrap();
    assert_eq!(failure(&server), ErrorKind::ConnectionReset);
}

#[test]
fn a_target_that_refuses_is_told_as_the_route_says() {
    let refused = |lab: &Lab| {
        let address: SocketAddr = format!("{SERVER}:81").parse().unwrap();
        lab.connect(address)
    };
    let lab = Lab::with_relays("mode = 'faithful'");
    assert_eq!(refused(&lab).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let missing: SocketAddr = "10.3.0.99:80".parse().unwrap();
    assert_eq!(lab.connect(missing).unwrap_err().kind(), ErrorKind::HostUnreachable);
    for mode in ["early", "late"] {
        let lab = Lab::with_relays(&format!("mode = '{mode}'"));
        assert_eq!(unhappy(refused(&lab)), ErrorKind::ConnectionReset);
        assert_eq!(unhappy(lab.connect(missing)), ErrorKind::ConnectionReset);
        lab.await_counter(Site::Edge, "connections_total", "verdict=\"refused\"", 1);
        lab.await_counter(Site::Edge, "connections_total", "verdict=\"unreachable\"", 1);
    }
}

#[test]
fn a_faithful_target_that_does_not_answer_is_silent() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, &format!("connect-timeout = '1s'\n{EXIT}"));
    lab.start(Site::Edge, &edge("mode = 'faithful'"));
    // All packets to this port are dropped.
    let rule = "table inet silence { chain in { type filter hook input priority 0; tcp dport 82 drop; }; }";
    lab.server.run("nft", [rule]);
    let address: SocketAddr = format!("{SERVER}:82").parse().unwrap();
    let error =
        lab.client.inside(|| TcpStream::connect_timeout(&address, Duration::from_secs(3))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(lab.counter(Site::Edge, "connections_total", "verdict=\"timed-out\"") >= 1);
}

#[test]
fn a_slow_reader_holds_the_sender_back() {
    let lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    server.set_nonblocking(true).unwrap();
    let mut sent = 0u64;
    let mut quiet = Instant::now();
    // Sends until nothing was accepted for a second. All buffers on the path are then full.
    while quiet.elapsed() < Duration::from_secs(1) {
        match (&server).write(&[7; 65_536]) {
            Ok(count) => (sent, quiet) = (sent + count as u64, Instant::now()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    assert!(sent < 200 << 20, "{sent} bytes are somewhere");
    let resident = |site| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", lab.pid(site))).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    assert!(resident(Site::Edge) < 64 << 10 && resident(Site::Exit) < 64 << 10);
    drop(server);
    let mut left = 0u64;
    let mut buffer = vec![0; 1 << 20];
    while let Ok(count @ 1..) = (&client).read(&mut buffer) {
        left += count as u64;
    }
    assert_eq!(left, sent);
}

#[test]
fn an_exit_that_was_killed_and_started_again_gets_no_stale_connection() {
    check_killed_exit(Lab::with_relays(""), EXIT);
}

fn check_killed_exit(mut lab: Lab, exit: &str) {
    let listener = lab.listen(&format!("{SERVER}:80"));
    await_until(|| lab.status(Site::Edge)["peers"][0]["pool"]["ready"] == 4, || lab.log(Site::Edge));
    let (client, _server) = lab.pair(&listener);
    lab.kill(Site::Exit);
    assert_eq!(
        failure(&client),
        ErrorKind::ConnectionReset,
        "what was on the way is not taken for all there was"
    );
    lab.start(Site::Exit, exit);
    for _ in 0..10 {
        let (client, server) = lab.pair(&listener);
        exchange(&client, &server, 1000);
    }
    let pool = &lab.status(Site::Edge)["peers"][0]["pool"];
    assert!(pool["stale"].as_u64().unwrap() >= 3, "{pool}");
}

#[test]
fn without_an_exit_clients_are_told_and_with_one_again_they_are_served() {
    let mut lab = Lab::build();
    lab.start(Site::Edge, &edge("mode = 'faithful'"));
    let address: SocketAddr = format!("{SERVER}:80").parse().unwrap();
    assert_eq!(lab.connect(address).unwrap_err().kind(), ErrorKind::HostUnreachable);
    let listener = lab.listen(&format!("{SERVER}:80"));
    lab.start(Site::Exit, EXIT);
    let (client, server) = lab.pair(&listener);
    exchange(&client, &server, 1000);
}

#[test]
fn a_killed_edge_lets_traffic_pass_it_by_and_the_next_cleans_up() {
    let mut lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    lab.kill(Site::Edge);
    let (client, server) = lab.pair(&listener);
    assert_eq!(server.peer_addr().unwrap(), client.local_addr().unwrap(), "by the plain path");
    exchange(&client, &server, 100_000);
    // A connection that is older than the relay must not be intercepted.
    let (old_client, old_server) = lab.pair(&listener);
    lab.start(Site::Edge, &edge(""));
    exchange(&old_client, &old_server, 100_000);
    let (client, server) = lab.pair(&listener);
    assert_ne!(server.peer_addr().unwrap(), client.local_addr().unwrap());
    exchange(&client, &server, 100_000);
    let rules = || {
        let output = lab.edge.inside(|| Command::new("ip").args(["rule"]).output()).unwrap();
        String::from_utf8(output.stdout).unwrap().matches("lookup 7440").count()
    };
    assert_eq!(rules(), 1);
    assert!(lab.ask(Site::Edge, &["drain"]).status.success());
    lab.await_end(Site::Edge);
    let rules = lab.edge.inside(|| Command::new("ip").args(["rule"]).output()).unwrap();
    assert!(!String::from_utf8(rules.stdout).unwrap().contains("7440"));
    let tables = lab.edge.inside(|| Command::new("nft").args(["list", "ruleset"]).output()).unwrap();
    assert!(!String::from_utf8_lossy(&tables.stdout).to_lowercase().contains("shunt"), "{tables:?}");
}

#[test]
fn the_target_can_be_shown_the_clients_address() {
    let lab = Lab::with_relays("source = 'client'");
    for address in [format!("{SERVER}:80"), format!("[{SERVER6}]:80")] {
        let listener = lab.listen(&address);
        let (client, server) = lab.pair(&listener);
        assert_eq!(server.peer_addr().unwrap().ip(), client.local_addr().unwrap().ip());
        exchange(&client, &server, 100_000);
    }
    lab.await_counter(Site::Exit, "connections_total", "verdict=\"connected\"", 2);
}

#[test]
fn relays_serve_where_ipv6_is_disabled() {
    for source in ["relay", "client"] {
        let mut lab = Lab::build();
        lab.disable_ipv6();
        lab.start(Site::Exit, EXIT);
        lab.start(Site::Edge, &edge(&format!("source = '{source}'")));
        let listener = lab.listen(&format!("{SERVER}:80"));
        let (client, server) = lab.pair(&listener);
        let is_shown = server.peer_addr().unwrap().ip() == client.local_addr().unwrap().ip();
        assert_eq!(is_shown, source == "client");
        exchange(&client, &server, 100_000);
    }
}

/// `ip netns exec` mounts a new /sys, without control groups.
#[test]
fn windows_need_no_mount_of_control_groups() {
    let mut lab = Lab::build();
    for (site, config) in [(Site::Exit, EXIT), (Site::Edge, &edge(""))] {
        let mut command = Command::new("unshare");
        let script = "umount --lazy /sys && mount -t sysfs sysfs /sys && exec \"$0\" \"$@\"";
        command.args(["--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_shunt")]);
        lab.start_by(site, config, command);
        assert!(!lab.log(site).contains("congestion window"), "{}", lab.log(site));
    }
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    exchange(&client, &server, 100_000);
}

/// Turbo start is switched on and off while the relay runs, and so are the windows of the
/// connections that are made then.
#[test]
fn windows_follow_the_configuration() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, EXIT);
    let plain = edge("").replace("turbo = true", "turbo = false");
    lab.start(Site::Edge, &plain);
    for (config, is_wide) in [(&plain, false), (&edge(""), true), (&plain, false)] {
        lab.write_config(Site::Edge, config);
        assert!(lab.ask(Site::Edge, &["reload"]).status.success());
        let windows = || {
            let words = ["-tinOH", "state", "established", "dst", "10.2.0.2:7440"];
            let output = lab.edge.inside(|| Command::new("ss").args(words).output()).unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let windows = text.split_whitespace().filter_map(|word| word.strip_prefix("cwnd:"));
            windows.map(|window| window.parse().unwrap()).collect::<Vec<u32>>()
        };
        let fit = |windows: &[u32]| windows.iter().all(|window| (*window > 1000) == is_wide);
        await_until(
            || {
                let windows = windows();
                windows.len() >= 4 && fit(&windows)
            },
            || format!("{is_wide}: {:?}\n{}", windows(), lab.log(Site::Edge)),
        );
    }
}

#[test]
fn an_exit_connects_only_where_it_may_and_only_for_its_peers() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, &EXIT.replace("10.3.0.0/24:*", "10.3.0.0/24:80"));
    lab.start(Site::Edge, &edge("mode = 'faithful'"));
    let allowed = lab.listen(&format!("{SERVER}:80"));
    let forbidden = lab.listen(&format!("{SERVER}:83"));
    drop(lab.pair(&allowed));
    assert_eq!(
        lab.connect(forbidden.local_addr().unwrap()).unwrap_err().kind(),
        ErrorKind::ConnectionRefused
    );
    forbidden.set_nonblocking(true).unwrap();
    assert_eq!(forbidden.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "not even an attempt");
    lab.await_counter(Site::Exit, "connections_total", "verdict=\"denied\"", 1);
    // The key is wrong, or the name.
    let other = lab.path("other");
    assert!(lab::shunt(&["relay", "new-key", other.to_str().unwrap()]).status.success());
    for config in [
        edge("").replace("KEY", other.to_str().unwrap()),
        edge("").replace("name = 'edge'", "name = 'nobody'"),
    ] {
        lab.kill(Site::Edge);
        let before = lab.counter(Site::Exit, "strangers_total", "");
        lab.start(Site::Edge, &config);
        await_until(|| lab.counter(Site::Exit, "strangers_total", "") > before, || lab.log(Site::Exit));
        assert_eq!(unhappy(lab.connect(allowed.local_addr().unwrap())), ErrorKind::ConnectionReset);
    }
}

#[test]
fn rubbish_gets_nothing_and_harms_nobody() {
    let lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    let exit: SocketAddr = "10.2.0.2:7440".parse().unwrap();
    for (number, length) in [1, 8, 9, 105, 5000].into_iter().cycle().take(50).enumerate() {
        let mut bytes = sample(length, number as u64);
        if number % 2 == 1 {
            // The bytes start like a hello frame.
            let shared = 9.min(bytes.len());
            bytes[..shared].copy_from_slice(&b"shuntrly\x01"[..shared]);
        }
        let stream = lab.edge.inside(|| TcpStream::connect_timeout(&exit, LIMIT)).map(with_limits).unwrap();
        let _ = send(&stream, &bytes);
        let answered = receive(&stream).unwrap_or_default();
        assert_eq!(answered, b"", "a stranger is told nothing");
    }
    await_until(|| lab.counter(Site::Exit, "strangers_total", "") >= 50, || lab.log(Site::Exit));
    exchange(&client, &server, 100_000);
}

#[test]
fn one_silent_address_does_not_keep_relays_from_a_handshake() {
    const SILENT: usize = 4500;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let enough = maximum.map_or(25_000, |most| most.min(25_000));
    assert!(enough > 2 * SILENT as u64, "a hard limit of {enough} descriptors is too low for this test");
    setrlimit(Resource::Nofile, Rlimit { current: Some(enough), maximum }).expect("below the hard limit");
    let mut lab = Lab::build();
    lab.start(Site::Exit, EXIT);
    // Without a pool, each connection needs its own handshake.
    lab.start(Site::Edge, &edge("").replace("low = 4, high = 64", "low = 0, high = 0"));
    let listener = lab.listen(&format!("{SERVER}:80"));
    let exit: SocketAddr = "10.2.0.2:7440".parse().unwrap();
    let silent: Vec<TcpStream> = lab
        .client
        .inside(|| (0..SILENT).map(|_| TcpStream::connect_timeout(&exit, LIMIT).unwrap()).collect());
    for _ in 0..15 {
        let (client, server) = lab.pair(&listener);
        send(&client, b"question").unwrap();
        assert_eq!(receive(&server).unwrap(), b"question");
    }
    lab.await_counter(Site::Exit, "connections_total", "verdict=\"connected\"", 15);
    // All connections beyond the share of one host were closed to make room.
    let evicted = || lab.counter(Site::Exit, "handshakes_evicted_total", "share=\"host\"");
    await_until(|| evicted() as usize >= SILENT - 1024, || lab.log(Site::Exit));
    assert!(lab.status(Site::Exit)["handshakes"].as_u64().unwrap() <= 1024);
    let told = lab.ask(Site::Exit, &["status"]);
    assert!(String::from_utf8_lossy(&told.stdout).contains("handshakes_evicted_total"), "{told:?}");
    assert!(lab.log(Site::Exit).contains("have not shown who they are"));
    drop(silent);
}

#[test]
fn a_forward_needs_no_interception() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, &EXIT.replace("[intercept]\n", ""));
    let config = "name = 'edge'\n[[peer]]\nname = 'exit'\naddress = '10.2.0.2:7440'\nkey = 'KEY'\n\
        [[forward]]\nlisten = '10.1.0.1:8080'\ntarget = '10.3.0.2:80'\nvia = 'exit'\n\
        [[forward]]\nlisten = '10.1.0.1:8081'\ntarget = '10.3.0.2:80'\n";
    lab.start(Site::Edge, config);
    let listener = lab.listen(&format!("{SERVER}:80"));
    for port in [8080, 8081] {
        let client = lab.connect(SocketAddr::from(([10, 1, 0, 1], port))).unwrap();
        let server = with_limits(listener.accept().unwrap().0);
        exchange(&client, &server, 1 << 20);
    }
}

#[test]
fn a_relay_in_the_middle_hands_on_and_a_circle_ends() {
    let mut lab = Lab::build();
    // The edge also accepts relays, and is its own next relay. From there, the target is one hop
    // further.
    let hop = "[accept]\nlisten = ['10.2.0.1:7440']\n[[accept.peer]]\nname = 'outer'\nkey = 'KEY'\ntargets = ['10.3.0.0/24:*']\n\
        [[peer]]\nname = 'exit'\naddress = '10.2.0.2:7440'\nkey = 'KEY'\n[[route]]\nto = ['10.3.0.0/24']\nvia = 'exit'\n";
    lab.start(Site::Exit, EXIT);
    lab.start(Site::Edge, &format!("name = 'edge'\n{hop}"));
    let outer = lab.path("outer.toml");
    let text = format!(
        "name = 'outer'\ncontrol = '{}'\n[[peer]]\nname = 'edge'\naddress = '10.2.0.1:7440'\nkey = '{}'\n\
         [[forward]]\nlisten = '10.1.0.2:8080'\ntarget = '10.3.0.2:80'\nvia = 'edge'\n",
        lab.path("outer.sock").display(),
        lab.path("key").display()
    );
    std::fs::write(&outer, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shunt"));
    command.arg("relay").arg("--config").arg(&outer).stderr(Stdio::null()).process_group(0);
    let _outer = Group(lab.client.inside(|| command.spawn().unwrap()));
    let listener = lab.listen(&format!("{SERVER}:80"));
    let address = SocketAddr::from(([10, 1, 0, 2], 8080));
    await_until(|| lab.connect(address).is_ok(), String::new);
    drop(listener.accept());
    let client = lab.connect(address).unwrap();
    let server = with_limits(listener.accept().unwrap().0);
    exchange(&client, &server, 1 << 20);
    // The exit sends the connection back to the edge, and so on.
    let circle = "[[peer]]\nname = 'edge'\naddress = '10.2.0.1:7440'\nkey = 'KEY'\n[[route]]\nto = ['10.3.0.0/24']\nvia = 'edge'\n";
    lab.kill(Site::Exit);
    lab.kill(Site::Edge);
    let exit = EXIT.replace("[intercept]\n", "");
    let hop = hop.replace("name = 'outer'", "name = 'exit'").replace(
        "[[peer]]",
        "[[accept.peer]]\nname = 'outer'\nkey = 'KEY'\ntargets = ['10.3.0.0/24:*']\n[[peer]]",
    );
    lab.start(Site::Edge, &format!("name = 'edge'\n{hop}"));
    lab.start(Site::Exit, &format!("{exit}{circle}"));
    await_until(
        || lab.connect(address).is_ok_and(|client| failure(&client) == ErrorKind::ConnectionReset),
        String::new,
    );
    await_until(
        || {
            lab.counter(Site::Exit, "connections_total", "circle")
                + lab.counter(Site::Edge, "connections_total", "circle")
                > 0
        },
        || lab.log(Site::Edge),
    );
}

#[test]
fn its_configuration_changes_while_connections_go_on() {
    let lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    assert!(lab.ask(Site::Edge, &["set", "peer.exit.pool.low=9", "route.0.mode=late"]).status.success());
    await_until(|| lab.status(Site::Edge)["peers"][0]["pool"]["ready"] == 9, || lab.log(Site::Edge));
    drop(lab.pair(&listener));
    lab.await_counter(Site::Edge, "connections_total", "mode=\"late\"", 1);
    let wrong = lab.ask(Site::Edge, &["set", "peer.exit.pool.low=900"]);
    assert!(!wrong.status.success());
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("above pool.high"), "{wrong:?}");
    assert_eq!(lab.status(Site::Edge)["config"]["peer"][0]["pool"]["low"], 9, "nothing has changed");
    // The route no longer matches. New connections bypass the relay, and existing ones continue.
    lab.write_config(Site::Edge, &edge("").replace("10.3.0.0/24", "10.9.0.0/24"));
    assert!(lab.ask(Site::Edge, &["reload"]).status.success());
    let (direct, other) = lab.pair(&listener);
    assert_eq!(other.peer_addr().unwrap(), direct.local_addr().unwrap());
    lab.write_config(Site::Edge, "rubbish");
    assert!(!lab.ask(Site::Edge, &["reload"]).status.success());
    exchange(&client, &server, 100_000);
}

/// A configuration that cannot be applied changes nothing, whichever part of it fails.
#[test]
fn a_configuration_that_fails_leaves_everything_as_it_was() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, EXIT);
    // nft refuses the next table if the file exists.
    let (tools, failing) = (lab.path("tools"), lab.path("failing"));
    std::fs::create_dir(&tools).unwrap();
    let path = std::env::var("PATH").unwrap();
    let script = "#!/bin/sh\ntext=$(cat)\ncase $text in *chain*)\n\
        if [ -e 'FAILING' ]; then rm 'FAILING'; exit 1; fi;;\nesac\n\
        printf '%s\\n' \"$text\" | PATH='TOOLS' nft \"$@\"\n";
    let script = script.replace("FAILING", failing.to_str().unwrap()).replace("TOOLS", &path);
    std::fs::write(tools.join("nft"), script).unwrap();
    std::fs::set_permissions(tools.join("nft"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shunt"));
    command.env("PATH", format!("{}:{path}", tools.display()));
    let forward = |address: &str| format!("[[forward]]\nlisten = '{address}'\ntarget = '10.3.0.2:80'\n");
    let (kept, added) = (forward("10.1.0.1:8080"), forward("10.1.0.1:8081"));
    lab.start_by(Site::Edge, &format!("{}{kept}", edge("")), command);
    let listener = lab.listen(&format!("{SERVER}:80"));
    let before = lab.status(Site::Edge)["config"].clone();
    let expect_nothing_has_changed = |what: &str| {
        assert_eq!(lab.status(Site::Edge)["config"], before, "{what}");
        let (client, server) = lab.pair(&listener);
        assert_ne!(server.peer_addr().unwrap(), client.local_addr().unwrap(), "{what}: still intercepted");
        exchange(&client, &server, 1000);
        let client = lab.connect(SocketAddr::from(([10, 1, 0, 1], 8080))).unwrap();
        exchange(&client, &with_limits(listener.accept().unwrap().0), 1000);
        let unwanted = lab.connect(SocketAddr::from(([10, 1, 0, 1], 8081)));
        assert_eq!(unwanted.unwrap_err().kind(), ErrorKind::ConnectionRefused, "{what}");
    };
    // An address is taken. The port of the kept forward would move to another task.
    let taken = lab.edge.inside(|| TcpListener::bind("10.1.0.1:9000").unwrap());
    let elsewhere = "metrics = '10.1.0.1:8080'\n";
    let config = format!("{elsewhere}{}{added}{}", edge(""), forward("10.1.0.1:9000"));
    lab.write_config(Site::Edge, &config.replace("10.3.0.0/24'", "10.9.0.0/24'"));
    assert!(!lab.ask(Site::Edge, &["reload"]).status.success());
    expect_nothing_has_changed("an address is taken");
    drop(taken);
    // The rules fail: those of another interception, and those of the same one.
    for route in ["", "mode = 'late'"] {
        for intercept in ["[intercept]\n", "[intercept]\nport = 7450\n"] {
            let config = format!("{elsewhere}{}{added}", edge(route)).replace("[intercept]\n", intercept);
            lab.write_config(Site::Edge, &config);
            std::fs::write(&failing, "").unwrap();
            assert!(!lab.ask(Site::Edge, &["reload"]).status.success());
            assert!(!failing.exists());
            expect_nothing_has_changed(intercept);
        }
    }
    // Nothing fails any more.
    assert!(lab.ask(Site::Edge, &["reload"]).status.success());
    drop(lab.connect(SocketAddr::from(([10, 1, 0, 1], 8081))).unwrap());
}

#[test]
fn a_drained_relay_ends_with_its_last_connection() {
    let mut lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    // The server may accept the connection before the edge does. A closed listener resets what it
    // has not accepted.
    await_until(|| lab.status(Site::Edge)["open-connections"] == 1, || lab.log(Site::Edge));
    assert!(lab.ask(Site::Edge, &["drain"]).status.success());
    let (direct, other) = lab.pair(&listener);
    assert_eq!(other.peer_addr().unwrap(), direct.local_addr().unwrap(), "new ones pass it by");
    // A change must not start to intercept again.
    for words in [&["reload"][..], &["set", "log-connections=true"]] {
        let refused = lab.ask(Site::Edge, words);
        assert!(!refused.status.success(), "{words:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("the relay drains"), "{refused:?}");
    }
    kill_process(Pid::from_raw(lab.pid(Site::Edge) as i32).unwrap(), Signal::HUP).unwrap();
    await_until(|| lab.log(Site::Edge).contains("the relay drains"), || lab.log(Site::Edge));
    let (direct, other) = lab.pair(&listener);
    assert_eq!(other.peer_addr().unwrap(), direct.local_addr().unwrap(), "new ones still pass it by");
    exchange(&client, &server, 1 << 20);
    drop((client, server));
    lab.await_end(Site::Edge);
}

/// The kernel has completed the connections of these clients while the relay was stopped.
#[test]
fn a_drained_relay_serves_clients_that_it_has_not_accepted_yet() {
    let mut lab = Lab::build();
    let config = "name = 'edge'\n[[forward]]\nlisten = '10.1.0.1:8080'\ntarget = '10.3.0.2:80'\n";
    lab.start(Site::Edge, config);
    let listener = lab.listen(&format!("{SERVER}:80"));
    let edge = Pid::from_raw(lab.pid(Site::Edge) as i32).unwrap();
    kill_process(edge, Signal::STOP).unwrap();
    let connect = || lab.connect(SocketAddr::from(([10, 1, 0, 1], 8080))).unwrap();
    let clients: Vec<_> = (0..200).map(|_| connect()).collect();
    let mut control = UnixStream::connect(lab.control(Site::Edge)).unwrap();
    control.write_all(b"{\"drain\":600}\n").unwrap();
    kill_process(edge, Signal::CONT).unwrap();
    for _ in &clients {
        let mut server = with_limits(listener.accept().unwrap().0);
        server.write_all(b"served").unwrap();
    }
    for mut client in clients {
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "served");
    }
    lab.await_end(Site::Edge);
}

#[test]
fn a_listener_for_relays_has_the_congestion_control_of_the_configuration() {
    let lab = Lab::with_relays("");
    let used = || {
        let mut ss = Command::new("ss");
        let output = lab.exit.inside(|| ss.args(["-Htlni", "sport = :7440"]).output()).unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for algorithm in ["reno", "cubic"] {
        lab.write_config(Site::Exit, &format!("{EXIT}congestion = '{algorithm}'\n"));
        let reloaded = lab.ask(Site::Exit, &["reload"]);
        assert!(reloaded.status.success(), "{reloaded:?}");
        assert!(used().contains(&format!(" {algorithm} ")), "{}", used());
    }
}

#[test]
fn there_are_no_more_connections_than_there_may_be() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, EXIT);
    lab.start(Site::Edge, &format!("max-connections = 5\n{}", edge("")));
    let listener = lab.listen(&format!("{SERVER}:80"));
    let pairs: Vec<_> = (0..5).map(|_| lab.pair(&listener)).collect();
    // The server may accept the last connection before the edge has counted it.
    await_until(|| lab.status(Site::Edge)["open-connections"] == 5, || lab.log(Site::Edge));
    assert_eq!(unhappy(lab.connect(listener.local_addr().unwrap())), ErrorKind::ConnectionReset);
    lab.await_counter(Site::Edge, "connections_total", "verdict=\"full\"", 1);
    for (client, server) in &pairs {
        exchange(client, server, 1000);
    }
}

#[test]
fn nothing_is_lost_where_packets_are() {
    let far = shunt_wan::Config {
        delay: Duration::from_millis(10),
        bits_per_second: 200_000_000,
        queue_bytes: 500_000,
        loss: 0.01,
        seed: 7,
    };
    let mut lab = Lab::build_over(Some(far));
    lab.start(Site::Exit, EXIT);
    lab.start(Site::Edge, &edge("mode = 'faithful'"));
    let listener = lab.listen(&format!("{SERVER}:80"));
    for _ in 0..3 {
        let (client, server) = lab.pair(&listener);
        exchange(&client, &server, 2 << 20);
    }
}

#[test]
fn packets_are_small_where_the_way_is_narrow() {
    let lab = Lab::with_relays("");
    lab.edge.words("ip link set right mtu 1400");
    lab.exit.words("ip link set left mtu 1400");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    exchange(&client, &server, 4 << 20);
}

#[test]
fn a_burst_finds_enough_connections_the_second_time() {
    let lab = Lab::with_relays("");
    assert!(lab.ask(Site::Edge, &["set", "peer.exit.pool.high=256"]).status.success());
    let listener = lab.listen(&format!("{SERVER}:80"));
    let burst = || {
        let clients: Vec<TcpStream> =
            (0..200).map(|_| lab.connect(listener.local_addr().unwrap()).unwrap()).collect();
        let servers: Vec<TcpStream> = (0..200).map(|_| listener.accept().unwrap().0).collect();
        (clients, servers)
    };
    drop(burst());
    await_until(
        || lab.status(Site::Edge)["peers"][0]["pool"]["ready"].as_u64() >= Some(200),
        || lab.log(Site::Edge),
    );
    let misses = || lab.status(Site::Edge)["peers"][0]["pool"]["misses"].as_u64().unwrap();
    let before = misses();
    drop(burst());
    assert_eq!(misses(), before);
}

#[test]
fn ten_thousand_connections_live_side_by_side() {
    // Each connection takes two descriptors, in a relay and in this process. A hard limit reduces
    // the number of connections.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let count = maximum.map_or(10_000, |most| 10_000.min((most as usize - 500) / 2));
    assert!(count > 5_000, "a hard limit of {maximum:?} descriptors is too low for this test");
    let enough = Some(2 * count as u64 + 500);
    setrlimit(Resource::Nofile, Rlimit { current: enough, maximum }).expect("below the hard limit");
    let lab = Lab::with_relays("");
    let listener = lab.listen(&format!("{SERVER}:80"));
    let address = listener.local_addr().unwrap();
    let mut pairs: Vec<(TcpStream, TcpStream)> = Vec::new();
    std::thread::scope(|scope| {
        let servers = scope.spawn(|| -> Vec<TcpStream> {
            (0..count).map(|_| with_limits(listener.accept().unwrap().0)).collect()
        });
        // All clients share one thread in the namespace. Otherwise each would need a thread.
        let clients = lab.client.inside(|| -> Vec<TcpStream> {
            let connect = |number: usize| {
                let mut stream = with_limits(TcpStream::connect_timeout(&address, LIMIT).unwrap());
                stream.write_all(&(number as u32).to_be_bytes()).unwrap();
                stream
            };
            (0..count).map(connect).collect()
        });
        let mut servers: Vec<Option<TcpStream>> = servers.join().unwrap().into_iter().map(Some).collect();
        let mut by_number: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
        for server in &mut servers {
            let mut server = server.take().unwrap();
            let mut number = [0; 4];
            server.read_exact(&mut number).unwrap();
            by_number[u32::from_be_bytes(number) as usize] = Some(server);
        }
        pairs = clients
            .into_iter()
            .zip(by_number.into_iter().map(|server| server.expect("each has come")))
            .collect();
    });
    assert_eq!(lab.status(Site::Edge)["open-connections"], count);
    for (number, (client, server)) in pairs.iter_mut().enumerate() {
        server.write_all(&(number as u64).to_be_bytes()).unwrap();
        let mut answer = [0; 8];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(u64::from_be_bytes(answer), number as u64);
    }
    drop(pairs);
    await_until(|| lab.status(Site::Edge)["open-connections"] == 0, || lab.log(Site::Edge));
    await_until(|| lab.status(Site::Exit)["open-connections"] == 0, || lab.log(Site::Exit));
}

/// Executes the first example of the documentation exactly as written, in a new directory.
#[test]
fn the_first_example_of_the_documentation_works() {
    let text = include_str!("../../../docs/relay.md");
    let section = text.split("## ").find(|section| section.starts_with("Try it without privilege")).unwrap();
    let block: String = section
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .map(|line| format!("{line}\n"))
        .collect();
    let file = |name: &str| {
        let from = block.split_once(&format!("# {name}\n")).unwrap().1;
        from.lines()
            .take_while(|line| !line.starts_with("# ") && !line.starts_with("shunt "))
            .collect::<Vec<_>>()
            .join("\n")
    };
    let directory = tempfile::tempdir().unwrap();
    for name in ["exit.toml", "edge.toml"] {
        std::fs::write(directory.path().join(name), file(name)).unwrap();
    }
    let commands: String = block
        .lines()
        .filter(|line| line.starts_with("shunt ") || line.starts_with("curl "))
        .collect::<Vec<_>>()
        .join("\n");
    assert!(commands.contains("curl http://127.0.0.1:8080/"), "{commands}");
    let net = shunt_netns::Net::new();
    let listener = net.inside(|| TcpListener::bind("127.0.0.1:80").unwrap());
    let server = std::thread::spawn(move || {
        let stream = with_limits(listener.accept().unwrap().0);
        let mut request = [0; 4096];
        let _ = (&stream).read(&mut request).unwrap();
        send(&stream, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").unwrap();
    });
    // The relays need a moment to start. They end with the shell.
    let script = format!(
        "trap 'kill $(jobs -p)' EXIT\n{}",
        commands.replace("curl ", "sleep 2; curl -sS --max-time 10 ")
    );
    let shunt = std::path::Path::new(env!("CARGO_BIN_EXE_shunt")).parent().unwrap();
    let path = format!("{}:{}", shunt.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.args(["-ec", &script]).env("PATH", path).env("SHUNT_LOG", "warn").current_dir(directory.path());
    let output = net.inside(|| command.output()).unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("hello") && printed.contains("relay edge"), "{output:?}");
    server.join().unwrap();
}

/// A process group, which ends when this is dropped.
struct Group(std::process::Child);

impl Drop for Group {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

#[test]
fn curl_ssh_and_a_database_client_work() {
    let lab = Lab::with_relays("");
    let directory = lab.path("servers");
    std::fs::create_dir(&directory).unwrap();
    // PostgreSQL runs as an unprivileged user and must be able to enter the directories.
    for path in [directory.parent().unwrap(), &directory] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new("bash");
    command.args(["-c", include_str!("relay/servers.sh"), "servers"]).arg(&directory);
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut servers = Group(lab.server.inside(|| command.spawn().unwrap()));
    let mut line = String::new();
    BufReader::new(servers.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n", "see the logs above");
    let client = |line: &str| {
        let mut command = Command::new("bash");
        command.args(["-ec", line]).current_dir(&directory).stdin(Stdio::null());
        let output = lab.client.inside(|| command.output()).unwrap();
        assert!(output.status.success(), "{line}: {output:?}\n{}", lab.log(Site::Edge));
        output.stdout
    };
    let file = std::fs::read(directory.join("www/file")).unwrap();
    assert!(client("curl -sS --max-time 20 http://10.3.0.2/file") == file);
    let ssh = "ssh -F /dev/null -i user_key -o BatchMode=yes -o UserKnownHostsFile=known_hosts root@10.3.0.2";
    assert!(client(&format!("{ssh} cat {}/www/file", directory.display())) == file);
    assert!(client(&format!("{ssh} sha256sum < www/file")) == client("sha256sum < www/file"));
    let psql = "PATH=$PATH:$(echo /usr/lib/postgresql/*/bin) psql -h 10.3.0.2 -U postgres -XAtc";
    assert_eq!(client(&format!("{psql} 'select sum(i) from generate_series(1, 100000) i'")), b"5000050000\n");
    lab.await_counter(Site::Edge, "connections_total", "mode=\"early\",verdict=\"connected\"", 4);
}

#[test]
fn metrics_are_there_for_prometheus() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, EXIT);
    lab.start(Site::Edge, &format!("metrics = '10.1.0.1:9440'\n{}", edge("")));
    let listener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    exchange(&client, &server, 1000);
    let page = |path: &str| {
        let stream = lab.connect(SocketAddr::from(([10, 1, 0, 1], 9440))).unwrap();
        (&stream).write_all(format!("GET {path} HTTP/1.1\r\nHost: relay\r\n\r\n").as_bytes()).unwrap();
        String::from_utf8(receive(&stream).unwrap()).unwrap()
    };
    let text = page("/metrics");
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.contains("shunt_relay_bytes_total{via=\"exit\",direction=\"down\"} 1000\n"), "{text}");
    assert!(text.contains("shunt_relay_set_up_seconds_count{via=\"exit\"} 1\n"), "{text}");
    assert!(text.contains("shunt_relay_pool_connections{peer=\"exit\",state=\"ready\"}"), "{text}");
    dashboard::expect_all_on(&text, "shunt_relay");
    assert!(page("/").starts_with("HTTP/1.1 404"));
}

#[test]
fn a_connection_has_a_line_in_the_log_if_that_is_wished() {
    let mut lab = Lab::build();
    lab.start(Site::Exit, EXIT);
    lab.start(Site::Edge, &format!("log-connections = true\n{}", edge("")));
    let listener: TcpListener = lab.listen(&format!("{SERVER}:80"));
    let (client, server) = lab.pair(&listener);
    exchange(&client, &server, 1000);
    drop((client, server));
    await_until(|| lab.log(Site::Edge).contains("first_down"), || lab.log(Site::Edge));
    let log = lab.log(Site::Edge);
    let line = log.lines().find(|line| line.contains("first_down")).unwrap();
    for part in ["10.3.0.2:80", "connected", "accepted", "answered", "1000"] {
        assert!(line.contains(part), "{line}");
    }
}
