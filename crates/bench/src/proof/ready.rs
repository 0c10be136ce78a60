//! Finds listening TCP ports and their processes in /proc, to detect when a server is ready. It
//! does not connect, because a server may accept only one connection.

use std::collections::{BTreeMap, BTreeSet};

/// The state of a listening socket in /proc/net/tcp.
const LISTENS: &str = "0A";

/// Returns true if a socket listens on this port.
pub(super) fn is_listened_at(port: u16) -> bool {
    listeners().values().any(|taken| *taken == port)
}

/// Returns the ports that these processes listen on.
pub(super) fn ports_of(pids: &[u32]) -> BTreeSet<u16> {
    let listeners = listeners();
    pids.iter().flat_map(|pid| sockets(*pid)).filter_map(|inode| listeners.get(&inode).copied()).collect()
}

/// Returns all listening ports by the inode of their socket.
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

/// Returns the inodes of a process's sockets.
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
