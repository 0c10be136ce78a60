//! Checks for features that a relay uses. Without any of them, a relay still serves the ports that
//! its configuration names.

use shunt_relay::probe;

use super::{Check, State};

pub(super) fn checks() -> Vec<Check> {
    vec![interception(), windows(), congestion()]
}

fn interception() -> Check {
    let meaning = "relays that take connections from the packets that this machine routes";
    let check = |found| Check::ok("interception", meaning, found);
    match probe::interception() {
        Ok(()) => check("works, tried in a network namespace".to_owned()),
        Err(why) => check(why).lacking(
            State::Limited,
            "run the relay as root, install nftables, iptables and iproute2, or use its [[forward]] ports, which need nothing",
        ),
    }
}

fn windows() -> Check {
    let check = |found| Check::ok("first windows", "relays with turbo start", found);
    match probe::windows() {
        Ok(()) => check("a sockops program can set them".to_owned()),
        Err(why) => check(why).lacking(
            State::Limited,
            "run the relay as root on a machine with cgroup v2; without it legs begin with the kernel's own window",
        ),
    }
}

fn congestion() -> Check {
    let check = |found| Check::ok("bbr", "relays with turbo start", found);
    match probe::congestion("bbr") {
        Ok(()) => check("available".to_owned()),
        Err(why) => check(why).lacking(
            State::Limited,
            "modprobe tcp_bbr; without it legs use the machine's congestion control, and slow down where packets are lost",
        ),
    }
}
