//! Threads and signal stacks with as little room as programs give them.

use shunt_compat::{both, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn the_least_stack_of_a_thread_is_enough_and_so_is_8_kib_for_a_handler() {
    both(LIMIT, |host| {
        compile(host, "small_stacks", &[]);
        let port = host.port();
        let transport = host.watch_transport();
        let ended = host.program("./small_stacks").arg(port.to_string()).start("program").wait(LIMIT);
        eprintln!("{}", ended.stderr);
        assert!(ended.success(), "{}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
        if transport.is_watched() {
            assert!(transport.on_shm(port) > 0, "{}", transport.report(port));
        }
        ended.stdout
    });
}
