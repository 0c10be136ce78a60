//! When a server is ready: which TCP ports are listened at, and by whom, as /proc tells it. Nobody connects to find out: that
//! could be the one connection that a server takes.

use std::collections::{BTreeMap, BTreeSet};

/// State of a socket that listens, in /proc/net/tcp.
const LISTENS: &str = "0A";

/// Whether anybody listens at this port.
pub(super) fn is_listened_at(port: u16) -> bool {
    listeners().values().any(|taken| *taken == port)
}

/// The ports at which these processes listen.
pub(super) fn ports_of(pids: &[u32]) -> BTreeSet<u16> {
    let listeners = listeners();
    pids.iter().flat_map(|pid| sockets(*pid)).filter_map(|inode| listeners.get(&inode).copied()).collect()
}

/// Every port that is listened at, by the inode of the socket.
fn listeners() -> BTreeMap<u64, u16> {
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .flat_map(|path| parse(&std::fs::read_to_string(path).unwrap_or_default()))
        .collect()
}

fn parse(text: &str) -> Vec<(u64, u16)> {
    let listener = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (_, port) = words.get(1)?.rsplit_once(':')?;
        let listens = *words.get(3)? == LISTENS;
        listens.then_some((words.get(9)?.parse().ok()?, u16::from_str_radix(port, 16).ok()?))
    };
    text.lines().filter_map(listener).collect()
}

/// The inodes of all sockets of a process.
fn sockets(pid: u32) -> Vec<u64> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let inode =
        |link: std::path::PathBuf| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok();
    entries.filter_map(|entry| inode(std::fs::read_link(entry.path()).ok()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn who_listens_where_is_found() {
        let listeners = ["127.0.0.1:0", "[::1]:0"].map(|address| TcpListener::bind(address).unwrap());
        let ports = listeners.each_ref().map(|listener| listener.local_addr().unwrap().port());
        let own = ports_of(&[std::process::id()]);
        assert!(ports.iter().all(|port| own.contains(port) && is_listened_at(*port)), "{own:?}");
        assert!(!ports.iter().any(|port| ports_of(&[1]).contains(port)));
    }

    #[test]
    fn a_connection_is_no_listener() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let listens = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1\n";
        let connected = "   1: 0100007F:1F91 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 78 1\n";
        assert_eq!(parse(&[head, listens, connected].concat()), [(77, 8080)]);
    }
}
