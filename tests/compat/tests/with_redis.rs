//! Clients of Redis: Puma with a page that queries it, and Celery, whose tasks and results pass
//! through it.

use shunt_compat::{Expected, Host, Program, both, end_on_transport};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);
const CLIENTS: usize = 8;
const THREADS: usize = 8;

fn redis(host: &Host, port: u16) -> Program {
    let server = host
        .program("redis-server")
        .words(&format!("--bind 127.0.0.1 --save --appendonly no --port {port}"))
        .start("redis");
    host.wait_for_port(port);
    server
}

#[test]
fn puma_with_a_page_that_asks_redis() {
    both(Duration::from_secs(100), |host| {
        let (port, behind) = (host.port(), host.port());
        let storage = redis(host, behind);
        let server = host
            .script("puma", "page.ru")
            .words(&format!("--bind tcp://127.0.0.1:{port} --threads {THREADS}:{THREADS} --environment none"))
            .env("REDIS_PORT", behind.to_string())
            .start("puma");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let asking = host
            .script("python3", "pages.py")
            .args([&port.to_string(), "/", &CLIENTS.to_string(), "30", "gate"])
            .start("pages");
        let both_hops = [
            Expected { port, connections: CLIENTS, share: 0.8 },
            Expected { port: behind, connections: 1, share: 0.8 },
        ];
        let printed = end_on_transport(host, &transport, (asking, "gate"), &both_hops);
        drop(server);
        drop(storage);
        printed
    });
}

#[test]
fn celery_with_tasks_and_results_in_redis() {
    both(Duration::from_secs(100), |host| {
        let port = host.port();
        let storage = redis(host, port);
        let transport = host.watch_transport();
        let worker = host
            .program("/usr/bin/python3")
            .words("-m celery --app tasks worker --concurrency 2 --without-gossip --without-mingle --loglevel WARNING")
            .env("REDIS_PORT", port.to_string());
        let client =
            host.script("/usr/bin/python3", "tasks.py").arg("60").env("REDIS_PORT", port.to_string());
        let worker = worker.env("C_FORCE_ROOT", "1").start("worker");
        let asked = client.run("client", LIMIT);
        transport.expect(Expected { port, connections: 2, share: 0.5 });
        drop(worker);
        drop(storage);
        asked.stdout
    });
}
