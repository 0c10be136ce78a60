//! Connections whose bytes are moved between queues by other programs in the kernel (sockmap). TCP
//! does not count these bytes, so the offset at which a lane begins is unknown. Such a connection
//! must stay on TCP. Needs root. This is a separate file because the test process itself enters the
//! control group.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shunt_abi::reason::{Reason, Transport};
use shunt_compat::under_shunt;
use shunt_kernel::redirect::Redirect;

const CONNECTIONS: usize = 4;

/// Keeps this process in the group of a `Redirect` until it is dropped.
struct Inside {
    back: PathBuf,
}

impl Inside {
    fn enter(redirect: &Redirect) -> Inside {
        let entrance = redirect.entrance();
        let back = entrance.parent().and_then(Path::parent).expect("a group").join("cgroup.procs");
        fs::write(entrance, "0").expect("root may enter");
        Inside { back }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = fs::write(&self.back, "0");
    }
}

#[test]
fn a_connection_whose_bytes_go_past_tcp_is_left_alone() {
    under_shunt(Duration::from_secs(60), |host| {
        let redirect = Redirect::attach().expect("root may load it");
        let port = host.port();
        let inside = Inside::enter(&redirect);
        let start = |words: &[&str], name: &str| host.script("python3", "echo.py").args(words).start(name);
        let server = start(&["server", "threads", &port.to_string()], "server");
        host.wait_for_port(port);
        let count = CONNECTIONS.to_string();
        let client = start(&["client", "threads", &port.to_string(), &count, "20", "3"], "client");
        drop(inside);
        let mut reasons = Vec::new();
        while client.is_running() {
            for process in host.status().into_iter().flat_map(|snapshot| snapshot.processes) {
                for one in process.connections {
                    assert_eq!(
                        (one.send.transport, one.receive.transport),
                        (Transport::Tcp, Transport::Tcp),
                        "{one:?}"
                    );
                    reasons.push(one.send.reason);
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let ended = client.wait(Duration::from_secs(40));
        assert!(ended.success(), "{}\n{}", ended.stdout, ended.stderr);
        assert!(reasons.contains(&Reason::OffsetUnclear), "{reasons:?}");
        drop(server);
        drop(redirect);
    });
}
