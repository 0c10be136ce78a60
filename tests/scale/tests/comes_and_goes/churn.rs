//! Opens and closes connections as fast as possible. Nothing may be left of them. The rates are
//! printed natively and under shunt, for comparison. `SCALE_CHURN_SECONDS` makes the test longer.

use std::time::Duration;

use shunt_compat::{Host, both};
use shunt_scale::{Usage, load, serve, wait_until};

const LIMIT: Duration = Duration::from_secs(300);

/// One exchange is too few for shunt to offer a connection; eight are enough.
#[test]
fn short_connections_leave_nothing_behind() {
    churn(1);
}

#[test]
fn connections_that_end_while_they_are_paired_leave_nothing_behind() {
    churn(8);
}

fn churn(exchanges: usize) {
    let seconds: f64 =
        std::env::var("SCALE_CHURN_SECONDS").map_or(2.0, |text| text.parse().expect("a number"));
    both(LIMIT, move |host: &Host| {
        let executable = env!("CARGO_BIN_EXE_scale-load");
        let (server, port) = serve(host, executable);
        // The first round creates what is kept for reuse.
        let round = |name: &str| {
            let words = format!("churn {port} {seconds} 4 {exchanges}");
            let (ended, cpu) = load(host, executable, &words).start(name).wait_with_cpu(LIMIT);
            assert!(ended.success(), "{}", ended.stderr);
            println!("{:?}, {exchanges} exchanges each: {} {cpu:?}", host.mode(), ended.stdout.trim());
        };
        round("first");
        let settled = || Usage::of(server.pid()).expect("it serves");
        let before = settled();
        let cpu = server.cpu();
        round("second");
        println!(
            "{:?}, the server: {:?}; the broker: {:?}",
            host.mode(),
            server.cpu() - cpu,
            host.broker_pid().and_then(Usage::of)
        );
        wait_until("the server holds no more than before", Duration::from_secs(30), || {
            drop(std::net::TcpStream::connect(("127.0.0.1", port)));
            let now = settled();
            now.descriptors <= before.descriptors + 4
                && now.mappings <= before.mappings + 4
                && now.private_kib <= before.private_kib + 2048
        });
        assert!(server.is_running());
        server.stop();
    });
}
