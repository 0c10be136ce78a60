//! Clients that connect as root and change their user before a request. The answer depends on the
//! user at the time of the request.

mod common;

use std::process::Command;

use common::{Broker, Process, expect_links, loopback};
use shunt_abi::control::{Pair, Reply, Request, Status};

/// A program that connects, changes its identity as its argument requires, and sends a request. It
/// prints how much it may see: everything, only its own, or nothing.
const ASK: &str = r#"
import ctypes, json, os, socket, struct, sys
path, request, what = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(path)
if what == "child":
    if os.fork():
        os.wait()
        os._exit(0)
    os.setresuid(65534, 65534, 65534)
elif what == "setresuid":
    os.setresuid(65534, 65534, 65534)
elif what == "seteuid":
    os.seteuid(65534)
elif what == "syscall":
    assert libc.syscall(117, 65534, 65534, 65534) == 0 or libc.syscall(147, 65534, 65534, 65534) == 0
elif what == "unshare":
    assert libc.unshare(0x40000000) == 0
client.send(request)
client.settimeout(30)
first = client.recv(1 << 16)
if not first:
    print("nothing")
else:
    length, text = struct.unpack("<Q", first[8:16])[0], b""
    while len(text) < length:
        text += client.recv(1 << 20)
    told = json.loads(text)
    print("everything" if told["of_all"] else "own", len(told["processes"]))
sys.stdout.flush()
"#;

fn told(broker: &Broker, what: &str) -> String {
    let request = Request::from(Status { pad: 0 }).encode();
    let request: String = request.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let output = Command::new("python3")
        .args(["-c", ASK])
        .arg(broker.socket())
        .args([&request, what])
        .output()
        .expect("python3 runs");
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn root_that_has_become_less_is_told_what_that_one_may_know() {
    let broker = Broker::start_for_all(|_| {});
    let _other = broker.process();
    assert_eq!(told(&broker, "nothing"), "everything 1");
    for what in ["setresuid", "syscall", "child"] {
        assert_eq!(told(&broker, what), "own 0", "{what}");
    }
    // The kernel still reports root as the sender. But the process has changed its effective user,
    // or its network namespace.
    for what in ["seteuid", "unshare"] {
        assert_eq!(told(&broker, what), "nothing", "{what}");
    }
    assert_eq!(broker.bad("not_still"), 2);
}

#[test]
fn a_process_that_has_become_another_users_goes_on() {
    let broker = Broker::start_for_all(|_| {});
    let mut other = broker.process();
    let mut one = broker.process();
    let mut pair = |one: &mut Process, ticket| -> [Pair; 2] {
        let (client, server) = loopback("127.0.0.1");
        one.offer(ticket, &client);
        other.offer(ticket, &server);
        if ticket == 1 {
            expect_links([one, &mut other]);
        }
        let expect = |process: &mut Process| loop {
            if let (Reply::Pair(pair), None) = process.next() {
                return pair;
            }
        };
        [expect(one), expect(&mut other)]
    };
    let before = pair(&mut one, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the call as such, of this thread alone.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
            assert_eq!(done, 0, "needs root");
            let after = pair(&mut one, 2);
            // The existing link still serves it.
            assert_eq!(after[0].link, before[0].link);
            one.release(&before[0]);
            assert!(pair(&mut one, 3)[0].link == before[0].link);
        });
    });
    assert_eq!(broker.status().pairs_made, 3);
    drop(one);
    common::eventually(|| broker.status().processes.len() == 1);
}
