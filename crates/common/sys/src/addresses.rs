//! Lists the addresses of a network namespace through a NETLINK_ROUTE socket that was created in
//! it. The calling thread does not enter the namespace.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};

use crate::peer::{HEADER, NLM_F_REQUEST, NLMSG_ERROR};
use crate::{Errno, Result};

const RTM_GETADDR: u16 = 22;
const RTM_NEWADDR: u16 = 20;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_DONE: u16 = 3;
/// Bytes of `struct ifaddrmsg`, which follows the header and precedes the attributes.
const MESSAGE: usize = 8;
/// Bytes of `struct rtattr`.
const ATTRIBUTE: usize = 4;
/// The attribute with the interface's address. If IFA_LOCAL is present too, IFA_ADDRESS is the
/// address of the other end of a point-to-point link.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// Opens a netlink socket for [`all`]. The default protocol of a netlink socket is NETLINK_ROUTE.
pub fn open() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)
}

/// Returns all IP addresses of the devices in the network namespace in which [`open`] created
/// `asker`. Never blocks.
pub fn all(asker: &OwnedFd) -> Result<Vec<IpAddr>> {
    let mut question = [0; HEADER + MESSAGE];
    question[..4].copy_from_slice(&((HEADER + MESSAGE) as u32).to_ne_bytes());
    question[4..6].copy_from_slice(&RTM_GETADDR.to_ne_bytes());
    question[6..8].copy_from_slice(&(NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    question[HEADER] = AddressFamily::UNSPEC.as_raw() as u8;
    // The kernel answers inside the send, and then inside each receive.
    send(asker, &question, SendFlags::DONTWAIT)?;
    let (mut found, mut buffer) = (Vec::new(), vec![0; 32 * 1024]);
    loop {
        let (len, _) = recv(asker, &mut buffer, RecvFlags::DONTWAIT)?;
        if !parts(&buffer[..len], &mut found)? {
            return Ok(found);
        }
    }
}

/// Adds the addresses of one datagram to `found`. Returns `true` if more datagrams follow.
fn parts(mut bytes: &[u8], found: &mut Vec<IpAddr>) -> Result<bool> {
    while bytes.len() >= HEADER {
        let len = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        match u16::from_ne_bytes([bytes[4], bytes[5]]) {
            NLMSG_DONE => return Ok(false),
            NLMSG_ERROR => return Err(Errno::IO),
            RTM_NEWADDR => {
                let attributes = bytes.get(HEADER + MESSAGE..len).unwrap_or_default();
                found.extend(address(attributes, IFA_LOCAL).or_else(|| address(attributes, IFA_ADDRESS)));
            }
            _ => {}
        }
        bytes = bytes.get(len.next_multiple_of(4).max(HEADER)..).unwrap_or_default();
    }
    Ok(true)
}

/// Returns the address in the first attribute of this kind. Its length determines the family.
fn address(mut attributes: &[u8], kind: u16) -> Option<IpAddr> {
    while let [a, b, c, d, ..] = *attributes {
        let len = usize::from(u16::from_ne_bytes([a, b]));
        if u16::from_ne_bytes([c, d]) == kind {
            let value = attributes.get(ATTRIBUTE..len)?;
            let v4 = <[u8; 4]>::try_from(value).map(IpAddr::from);
            return v4.or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok();
        }
        attributes = attributes.get(len.next_multiple_of(4).max(ATTRIBUTE)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_the_loopback_device_is_listed() {
        let asker = open().unwrap();
        for _ in 0..3 {
            let found = all(&asker).unwrap();
            assert!(
                ["127.0.0.1", "::1"].iter().all(|own| found.contains(&own.parse().unwrap())),
                "{found:?}"
            );
            assert!(!found.contains(&IpAddr::from([203, 0, 113, 1])), "{found:?}");
        }
    }
}
