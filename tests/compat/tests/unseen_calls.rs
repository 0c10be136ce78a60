//! System calls that the shim does not see, on connections and epoll instances that could be on
//! shared memory (L11). The program must behave as natively, and `shunt` must report the reason.

use shunt_compat::{Way, both, compile, converse, gate};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
const CONNECTIONS: usize = 4;

/// Tests an epoll instance that is created and filled through libc, and waited on by an inline
/// system call, as in Bun.
fn waits_inline(flags: &'static [&'static str], way: Way) {
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let program = compile(host, "inline_wait", flags);
        let server = host.program(program.to_string_lossy()).args([&number, &count]);
        let client =
            host.script("python3", "echo.py").args(["client", "threads", &number, &count, "60", &gate(port)]);
        converse(host, (port, CONNECTIONS), (server, client), way)
    });
}

#[test]
fn wait_in_a_large_program_keeps_it_on_tcp() {
    waits_inline(&["-DBIG"], Way::Tcp("own_calls"));
}

#[test]
fn wait_in_a_small_program_is_led_to_the_shim() {
    waits_inline(&[], Way::Shm);
}
