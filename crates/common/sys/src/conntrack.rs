//! Looks up how netfilter translates the addresses of a TCP connection (NETLINK_NETFILTER,
//! ctnetlink), as kube-proxy has it do.
//!
//! Example: 10.50.1.2:40000 connects to the service 10.96.0.10:80, which leads to 10.50.2.2:9000.
//! The kernel tracks the connection by two tuples, each with a source and a destination:
//!
//! ```text
//! original: 10.50.1.2:40000 → 10.96.0.10:80       what the client's end has
//! reply:    10.50.2.2:9000  → 10.50.1.2:40000     what the server's end has, as it sends
//! ```

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use crate::listed::{attribute, value};
use crate::peer::{HEADER, NLM_F_REQUEST, NLMSG_ERROR};
use crate::{Errno, Result};

/// IPCTNL_MSG_CT_GET, and its answer IPCTNL_MSG_CT_NEW, of NFNL_SUBSYS_CTNETLINK.
const GET: u16 = 1 << 8 | 1;
const NEW: u16 = 1 << 8;
/// Bytes of `struct nfgenmsg`, which follows the header and precedes the attributes.
const MESSAGE: usize = 4;
const NESTED: u16 = 1 << 15;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_PROTOINFO: u16 = 4;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
/// TCP_CONNTRACK_ESTABLISHED. Those before it are of a connection that is being made.
const ESTABLISHED: u8 = 3;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
/// Source and destination of each family.
const CTA_IP_V4: [u16; 2] = [1, 2];
const CTA_IP_V6: [u16; 2] = [3, 4];
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_PORTS: [u16; 2] = [2, 3];
const IPPROTO_TCP: u8 = 6;

/// The two ends of a tracked connection, as the server's end sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translated {
    /// The address and port at which the connection arrives.
    pub server: SocketAddr,
    /// The address and port from which it seems to come.
    pub client: SocketAddr,
    /// Neither end has closed it: it is not an earlier connection with the same addresses.
    pub is_open: bool,
}

/// Opens a netlink socket for [`find`]. It asks about the network namespace of this thread.
pub fn open() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::NETFILTER))
}

/// Returns the translation of the connection from `client` to `server`, as these are for the
/// client. Returns `None` if the kernel does not track it: it has not passed netfilter, or not yet.
/// Needs CAP_NET_ADMIN. Never blocks.
pub fn find(asker: &OwnedFd, client: SocketAddr, server: SocketAddr) -> Result<Option<Translated>> {
    // The kernel answers inside the send.
    send(asker, &question(client, server), SendFlags::DONTWAIT)?;
    let mut answer = [0; 2048];
    let (len, _) = recv(asker, &mut answer, RecvFlags::DONTWAIT)?;
    let answer = answer.get(..len).filter(|answer| answer.len() >= HEADER + MESSAGE).ok_or(Errno::PROTO)?;
    match u16::from_ne_bytes([answer[4], answer[5]]) {
        NEW => {}
        NLMSG_ERROR => {
            let code = i32::from_ne_bytes(answer[HEADER..HEADER + 4].try_into().map_err(|_| Errno::PROTO)?);
            return match Errno::from_raw_os_error(code.saturating_neg()) {
                Errno::NOENT => Ok(None),
                error => Err(error),
            };
        }
        _ => return Err(Errno::PROTO),
    }
    let attributes = &answer[HEADER + MESSAGE..];
    let reply = value(attributes, CTA_TUPLE_REPLY).ok_or(Errno::PROTO)?;
    let (server, client) = end_of(reply, 0).zip(end_of(reply, 1)).ok_or(Errno::PROTO)?;
    let tcp = value(attributes, CTA_PROTOINFO).and_then(|info| value(info, CTA_PROTOINFO_TCP));
    let state = tcp.and_then(|tcp| value(tcp, CTA_PROTOINFO_TCP_STATE)).ok_or(Errno::PROTO)?;
    let is_open = state.first().is_some_and(|state| *state <= ESTABLISHED);
    Ok(Some(Translated { server, client, is_open }))
}

fn question(client: SocketAddr, server: SocketAddr) -> Vec<u8> {
    let ends = [client, server];
    let (family, kinds) = match client {
        SocketAddr::V4(_) => (AddressFamily::INET, CTA_IP_V4),
        SocketAddr::V6(_) => (AddressFamily::INET6, CTA_IP_V6),
    };
    let octets = |end: SocketAddr| match end.ip() {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let addresses = [0, 1].map(|end| attribute(kinds[end], &octets(ends[end]))).concat();
    let ports = [0, 1].map(|end| padded(attribute(CTA_PROTO_PORTS[end], &ends[end].port().to_be_bytes())));
    let protocol = [padded(attribute(CTA_PROTO_NUM, &[IPPROTO_TCP])), ports.concat()].concat();
    let tuple =
        [attribute(NESTED | CTA_TUPLE_IP, &addresses), attribute(NESTED | CTA_TUPLE_PROTO, &protocol)];
    let tuple = attribute(NESTED | CTA_TUPLE_ORIG, &tuple.concat());
    let len = (HEADER + MESSAGE + tuple.len()) as u32;
    let mut bytes = vec![0; HEADER + MESSAGE];
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..6].copy_from_slice(&GET.to_ne_bytes());
    bytes[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    bytes[HEADER] = family.as_raw() as u8;
    bytes.extend(tuple);
    bytes
}

fn padded(mut attribute: Vec<u8>) -> Vec<u8> {
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// Returns an end of a tuple: 0 is the source, and 1 the destination.
fn end_of(tuple: &[u8], end: usize) -> Option<SocketAddr> {
    let (addresses, protocol) = (value(tuple, CTA_TUPLE_IP)?, value(tuple, CTA_TUPLE_PROTO)?);
    let v4 = value(addresses, CTA_IP_V4[end]).and_then(|it| <[u8; 4]>::try_from(it).ok()).map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(value(addresses, CTA_IP_V6[end])?).ok().map(IpAddr::from);
    let port = <[u8; 2]>::try_from(value(protocol, CTA_PROTO_PORTS[end])?).ok()?;
    Some(SocketAddr::new(v4.or_else(v6)?, u16::from_be_bytes(port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;

    /// Needs root and nft.
    #[test]
    fn a_translated_connection_is_found_by_the_addresses_of_its_client() {
        // The thread enters a new network namespace.
        std::thread::spawn(|| {
            // SAFETY: the thread shares no file descriptor table that it would leave.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            let run = |program: &str, words: &str| {
                assert!(Command::new(program).args(words.split(' ')).status().unwrap().success(), "{words}");
            };
            run("ip", "link set lo up");
            let asker = open().unwrap();
            for (family, any, server, service) in [
                ("ip", "127.0.0.1:0", "127.0.0.1", "127.0.0.2:80"),
                ("ip6", "[::1]:0", "[::1]", "[fd00::2]:80"),
            ] {
                let listener = TcpListener::bind(any).unwrap();
                let at = listener.local_addr().unwrap();
                if family == "ip6" {
                    run("ip", "address add fd00::1/64 dev lo nodad");
                    run("ip", "address add fd00::2/128 dev lo nodad");
                }
                let service: SocketAddr = service.parse().unwrap();
                run("nft", &format!("add table {family} t"));
                run("nft", &format!("add chain {family} t o {{ type nat hook output priority -100 ; }}"));
                let to = format!("{server}:{}", at.port());
                let host = service.ip();
                run("nft", &format!("add rule {family} t o {family} daddr {host} tcp dport 80 dnat to {to}"));
                let client = TcpStream::connect(service).unwrap();
                let own = client.local_addr().unwrap();
                let found = find(&asker, own, service).unwrap().unwrap();
                assert_eq!(found.server, at);
                assert_eq!(found.client, listener.accept().unwrap().1);
                assert!(found.is_open);
                client.shutdown(std::net::Shutdown::Write).unwrap();
                assert!(!find(&asker, own, service).unwrap().unwrap().is_open);
                assert_eq!(find(&asker, own, SocketAddr::new(host, 81)), Ok(None));
            }
        })
        .join()
        .unwrap();
    }
}
