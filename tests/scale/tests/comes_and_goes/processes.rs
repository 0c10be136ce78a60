//! Many simultaneous processes, each connected to one server and to its neighbour.
//!
//! There are 300 by default. `SCALE_PROCESSES=2000` is the number that is required of shunt.

use std::time::Duration;

use shunt_abi::reason::Reason;
use shunt_compat::{Host, both};
use shunt_scale::{Usage, ends, load, ready_members, serve, wait_until, wait_until_let_go};

const LIMIT: Duration = Duration::from_secs(900);

#[test]
fn processes_in_a_ring_around_a_server() {
    let count: usize = std::env::var("SCALE_PROCESSES").map_or(300, |text| text.parse().expect("a number"));
    both(LIMIT, move |host: &Host| {
        let executable = env!("CARGO_BIN_EXE_scale-load");
        let (server, port) = serve(host, executable);
        let before = Usage::of(server.pid()).expect("it serves");
        let words = format!("swarm {port} {} {count} 20 {}", port + 1, host.dir().display());
        let swarm = load(host, executable, &words).start("swarm");
        wait_until("the members are ready", LIMIT, || {
            assert!(swarm.is_running(), "{}", host.logs());
            ready_members(host.dir()) == count
        });
        if host.status().is_some() {
            let mut last = (0, 0);
            wait_until("the connections come onto shared memory", Duration::from_secs(120), || {
                let Some(snapshot) = host.status() else { return false };
                let (on, off) = ends(&snapshot);
                if last != (on, off.len()) {
                    last = (on, off.len());
                    println!("{on} ends on shared memory, {} not: {:?}", off.len(), off.first());
                }
                // Each member has a connection to the server and one to its neighbour, and both
                // ends of each report it. A server of thousands has no descriptors for the
                // doorbells of all of them.
                let limited = off.iter().filter(|one| one.send.reason == Reason::DescriptorLimit).count();
                on + limited == 4 * count && (limited == 0 || count > 1000)
            });
            println!("the server: {:?}", Usage::of(server.pid()));
            println!("the broker: {:?}", host.broker_pid().and_then(Usage::of));
        }
        host.replace("gate", "");
        let ended = swarm.wait(LIMIT);
        assert!(ended.success() && ended.stdout.contains("done"), "{}", ended.stderr);
        if host.status().is_some() {
            wait_until_let_go(server.pid(), port, &before, Duration::from_secs(60));
        }
        server.stop();
    });
}
