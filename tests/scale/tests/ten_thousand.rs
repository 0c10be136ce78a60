//! Ten thousand connections between two processes. Every byte is checked, all connections must
//! attach, and after they are closed nothing may be left of them.

use std::time::Duration;

use shunt_compat::{Host, both};
use shunt_scale::{Usage, ends, load, serve, wait_until, wait_until_let_go};

const CONNECTIONS: usize = 10_000;
const LIMIT: Duration = Duration::from_secs(240);

#[test]
fn ten_thousand_connections_of_one_pair_of_processes() {
    both(LIMIT, |host: &Host| {
        let executable = env!("CARGO_BIN_EXE_scale-load");
        let (server, port) = serve(host, executable);
        let before = Usage::of(server.pid()).expect("it serves");
        let gate = host.path("gate");
        let words = format!("hold {port} {CONNECTIONS} 12 2000 {}", gate.display());
        let mut client = load(host, executable, &words).start("client");
        client.wait_for_output("sparse_us", LIMIT);
        if host.status().is_some() {
            all_on_shared_memory(host, server.pid());
        }
        host.replace("gate", "");
        let ended = client.wait(LIMIT);
        assert!(ended.success() && ended.stdout.contains("done"), "{}", ended.stderr);
        if host.status().is_some() {
            // The client's 157 links end with it.
            wait_until_let_go(server.pid(), port, &before, Duration::from_secs(30));
        }
        assert!(server.is_running());
        server.stop();
    });
}

fn all_on_shared_memory(host: &Host, server: u32) {
    let mut report = String::new();
    let mut last = 0;
    wait_until("all connections come onto shared memory", Duration::from_secs(60), || {
        let Some(snapshot) = host.status() else { return false };
        let (on, off) = ends(&snapshot);
        if on != last {
            last = on;
            report = format!("{on} ends; of the others: {:?}", off.first());
            println!("{report}");
        }
        on == 2 * CONNECTIONS
    });
    let usage = Usage::of(server).expect("it serves");
    let each = usage.shared_kib * 1024 / CONNECTIONS as u64;
    println!(
        "{} mappings, {} descriptors; {each} bytes of links for each connection",
        usage.mappings, usage.descriptors
    );
    // The program's own connections, and a few descriptors of shunt. Links take none.
    assert!(usage.descriptors < CONNECTIONS as u64 + 32, "{usage:?}");
}
