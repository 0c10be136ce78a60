//! A broker that sends wrong messages. Whatever it sends, programs must receive from each other
//! what they receive without shunt, on TCP.
//!
//! HOSTILE_SEED and HOSTILE_ROUNDS select other messages, or more of them.

use shunt_compat::{compile, under_shunt};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);
const ROUNDS: u64 = 20;

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn lies_change_nothing() {
    under_shunt(Duration::from_secs(200), |host| {
        compile(host, "exchange", &[]);
        let expected = host.program("./exchange").native().run("natively", LIMIT).stdout;
        let (seed, rounds) = (variable("HOSTILE_SEED", 1), variable("HOSTILE_ROUNDS", ROUNDS));
        eprintln!("HOSTILE_SEED={seed} HOSTILE_ROUNDS={rounds}");
        let socket = host.path("false.sock");
        let mut broker = host
            .script("python3", "false_broker.py")
            .native()
            .arg(&socket)
            .args([seed.to_string(), shunt_abi::VERSION.to_string()])
            .start("broker-that-lies");
        broker.wait_for_output("lying", LIMIT);
        for round in 0..rounds {
            let ended = host
                .program(host.tools().expect("under shunt").shunt.to_string_lossy())
                .native()
                .args(["run", "--broker"])
                .arg(&socket)
                .args(["--", "./exchange"])
                .start("exchange")
                .wait(LIMIT);
            assert!(
                ended.success() && ended.stdout == expected,
                "round {round}: {}\n{}{}",
                ended.status,
                ended.stdout,
                ended.stderr
            );
        }
        assert!(broker.is_running(), "the broker did not lie to the end");
    });
}
