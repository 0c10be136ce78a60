//! Checks for features that a relay uses. Without any of them, a relay still serves the ports that
//! its configuration names.

use shunt_relay::probe;

use super::{Check, State};

pub(super) fn checks() -> Vec<Check> {
    vec![interception(), windows(), congestion()]
}

fn interception() -> Check {
    let meaning = "relays that intercept connections which this machine routes";
    let check = |found| Check::ok("interception", meaning, found);
    match probe::interception() {
        Ok(()) => check("works, tried in a network namespace".to_owned()),
        Err(why) => check(why).lacking(
            State::Limited,
            "run the relay as root, install nftables, iptables and iproute2, or use its [[forward]] ports, which need none of these",
        ),
    }
}

fn windows() -> Check {
    let check = |found| Check::ok("first windows", "relays with turbo start", found);
    match probe::windows() {
        Ok(()) => check("works: a sockops program can set them".to_owned()),
        Err(why) => check(why).lacking(
            State::Limited,
            "run the relay as root on a machine with cgroup v2; without it connections begin with the kernel's own window",
        ),
    }
}

fn congestion() -> Check {
    let check = |found| Check::ok("bbr", "relays with turbo start", found);
    match probe::congestion("bbr") {
        Ok(()) => check("available".to_owned()),
        Err(why) => check(why).lacking(
            State::Limited,
            "run `modprobe tcp_bbr`; without it connections use the machine's congestion control, and slow down where packets are lost",
        ),
    }
}
