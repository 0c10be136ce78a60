//! A connection that both ends open simultaneously, so that their SYNs cross. It is paired like any
//! other.

use shunt_compat::{Host, Mode, Program, both_at_once};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

fn nft(rule: &str) {
    assert!(Command::new("nft").arg(rule).status().expect("nft is installed").success());
}

fn connect(host: &Host, own: u16, peer: u16) -> Program {
    let ports = [own, peer].map(|port| port.to_string());
    let launch = host.script("python3", "simultaneous.py").args(ports).arg(host.dir());
    let mut program = launch.shunt_args(["--offer", "at-once"]).start(&own.to_string());
    program.wait_for_output("connecting", LIMIT);
    program
}

#[test]
fn a_connection_that_both_ends_open_is_paired() {
    both_at_once(2 * LIMIT, |host| {
        let (one, two) = (host.port(), host.port());
        // Both send a SYN before either receives one. The kernel sends them again a second later.
        nft(
            "add table ip t; add chain ip t in { type filter hook input priority 0; }; add rule ip t in tcp flags syn drop",
        );
        let mut programs = [connect(host, one, two), connect(host, two, one)];
        nft("delete table ip t");
        programs.iter_mut().for_each(|program| program.wait_for_output("connected", LIMIT));
        host.watch_transport().wait_for_shm(two, 1, LIMIT);
        if host.mode() == Mode::Shunt {
            let status = host.status().expect("a broker");
            assert_eq!(status.pairs_made, 1, "{:?}", status.offers_refused);
        }
        host.write("end", "");
        programs.map(|program| {
            let ended = program.wait(LIMIT);
            assert!(ended.success(), "{}", ended.stderr);
            ended.stdout
        })
    });
}
