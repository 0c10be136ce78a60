//! memcached and Redis behind their routers, with widely used clients. Every value must be on the
//! server that the hash selects.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use shunt_netns::Net;
use shunt_serve::hash::{Placement, Scheme};
use shunt_serve::service::Key;

use crate::common::Shell;
use crate::common::serving::{ADDRESS, Serving};
use crate::process::{SOURCES, Server, expect_engine, make, output, python};

const PORTS: [u16; 3] = [5000, 5001, 5002];

/// A router in front of three backends.
struct Router {
    serving: Serving,
    shell: Shell,
}

impl Router {
    fn start(net: &Arc<Net>, service: &str, engine: &str) -> Router {
        let shell = Shell::new();
        let file = Router::write(&shell, "modulo");
        let arguments = [service, "--engine", engine, "--backends", &file];
        Router { serving: Serving::start_in(net, &shell, &arguments), shell }
    }

    /// Changes the hash that maps keys to backends.
    fn hash(&self, hash: &str) {
        Router::write(&self.shell, hash);
        assert_eq!(self.serving.say(&["reload"]), (true, String::new()));
    }

    fn write(shell: &Shell, hash: &str) -> String {
        let backends = PORTS.map(|port| format!("[[backend]]\naddress = '127.0.0.1:{port}'\n"));
        let file = shell.file("backends.toml", format!("hash = '{hash}'\n{}", backends.concat()));
        file.to_str().unwrap().to_owned()
    }
}

/// Values that libmemcached has written directly to the servers are found through the router, and
/// the other way round. Then a client runs every command, and a load compares values.
fn memcached(engine: &str) {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("libmemcached");
    let source = Path::new(SOURCES).join("libmemcached.c");
    make(directory.path(), "gcc", &[source.to_str().unwrap(), "-o", "libmemcached", "-lmemcached"]);
    let net = Arc::new(Net::new());
    let start = |port: &u16| {
        let mut command = Command::new("memcached");
        command.args(["-u", "nobody", "-l", "127.0.0.1", "-t", "1", "-p", &port.to_string()]);
        Server::start(&net, &mut command, &[*port])
    };
    let _servers: Vec<Server> = PORTS.iter().map(start).collect();
    let router = Router::start(&net, "builtin:memcached-router", engine);
    let direct = PORTS.map(|port| format!("127.0.0.1:{port}"));
    let through = [ADDRESS.to_owned()];
    for hash in ["modulo", "ketama"] {
        router.hash(hash);
        for protocol in ["text", "binary"] {
            let run = |what: &str, prefix: &str, servers: &[String]| {
                let prefix = format!("{prefix}-{hash}-{protocol}");
                let mut command = Command::new(&program);
                output(&net, command.args([what, hash, protocol, &prefix, "150"]).args(servers));
            };
            run("write", "direct", &direct);
            run("read", "direct", &through);
            run("write", "through", &through);
            run("read", "through", &direct);
        }
    }
    output(&net, python("pymemcached.py").arg("4000"));
    for more in [&["--division=1"][..], &["--division=10"], &["--binary", "--division=10"]] {
        let mut command = Command::new("memcaslap");
        command.args(["-s", ADDRESS, "-T", "2", "-c", "8", "-x", "4000", "-w", "1k", "-v", "1.0"]);
        command.args(more);
        let said = output(&net, &mut command);
        let is_missed = |line: &&str| {
            let (name, count) = line.split_once(": ").unwrap_or_default();
            ["get_misses", "verify_misses", "verify_failed", "expired_get"].contains(&name) && count != "0"
        };
        let missed: Vec<&str> = said.lines().filter(is_missed).collect();
        assert!(said.contains("cmd_get: ") && missed.is_empty(), "{more:?}: {said}");
    }
    router.serving.await_status(|status| status["open-connections"] == 0);
    let status = router.serving.status();
    assert_eq!(status["drops"], serde_json::json!({}), "{status:#}");
    expect_engine(&status, engine);
    let backends = status["backends"].as_array().unwrap();
    assert!(backends.iter().all(|it| it["messages"].as_u64().unwrap() > 100), "{status:#}");
}

#[test]
fn memcached_moved_between_the_engines() {
    memcached("auto");
}

#[test]
fn memcached_in_the_kernel() {
    memcached("kernel");
}

#[test]
fn memcached_in_user_space() {
    memcached("user");
}

/// Every value written through the router is on the server that the hash selects. redis-benchmark
/// gets no errors.
fn redis(engine: &str) {
    let directory = tempfile::tempdir().unwrap();
    let net = Arc::new(Net::new());
    let start = |port: &u16| {
        let mut command = Command::new("redis-server");
        let port_text = port.to_string();
        command.args(["--port", &port_text, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        Server::start(&net, command.current_dir(directory.path()), &[*port])
    };
    let _servers: Vec<Server> = PORTS.iter().map(start).collect();
    let cli = |port: u16, words: &[&str]| {
        let mut command = Command::new("redis-cli");
        output(&net, command.args(["-h", "127.0.0.1", "-p", &port.to_string()]).args(words))
    };
    let router = Router::start(&net, "builtin:redis-router", engine);
    for (hash, scheme) in [("modulo", Scheme::Modulo), ("ketama", Scheme::Ketama)] {
        router.hash(hash);
        for port in PORTS {
            cli(port, &["flushall"]);
        }
        output(&net, python("pyredis.py").args(["4000", "300"]));
        assert_eq!(cli(4000, &["set", "shell", "a value"]), "OK\n");
        assert_eq!(cli(4000, &["get", "shell"]), "a value\n");
        let names = PORTS.map(|port| format!("127.0.0.1:{port}"));
        let placement = Placement::new(scheme, names.iter().map(|name| (name.as_str(), 1)));
        let mut found = 0;
        for (at, port) in PORTS.into_iter().enumerate() {
            for key in cli(port, &["keys", "*"]).lines() {
                let tag = key.trim_start_matches('{').split('}').next().unwrap();
                let belongs = placement.backend(tag.as_bytes(), &Key::Bytes(0..tag.len()));
                assert_eq!(belongs, Some(at), "{key}, {hash}");
                found += 1;
            }
        }
        assert_eq!(found, 300 - 20 + 2, "{hash}");
    }
    for depth in ["1", "16"] {
        let mut command = Command::new("redis-benchmark");
        command.args(["-p", "4000", "-n", "1000", "-c", "10", "-r", "1000", "-P", depth, "-q"]);
        let said = output(&net, &mut command);
        assert!(said.matches("requests per second").count() >= 19, "{said}");
        assert!(!said.to_lowercase().contains("error"), "{said}");
    }
    router.serving.await_status(|status| status["open-connections"] == 0);
    let status = router.serving.status();
    expect_engine(&status, engine);
    // pyredis.py makes six unknown commands. redis-benchmark asks for the server's configuration as
    // well.
    let drops = &status["drops"];
    let refused = drops["unknown-command"].as_u64().unwrap();
    assert!((6..=10).contains(&refused) && drops.as_object().unwrap().len() == 1, "{drops:#}");
}

#[test]
fn redis_moved_between_the_engines() {
    redis("auto");
}

#[test]
fn redis_in_the_kernel() {
    redis("kernel");
}

#[test]
fn redis_in_user_space() {
    redis("user");
}
