//! The devices by which packets leave the host, and whether they encrypt.

use std::net::IpAddr;

use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use shunt_sys::Errno;

use super::netlink::{Answers, Asker};

/// Looks up routes and devices of the host's network namespace.
#[derive(Debug)]
pub(super) struct Devices(Asker);

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    index: u32,
    kind: Option<InfoKind>,
}

impl Device {
    #[cfg(test)]
    pub(super) fn new(index: u32, kind: Option<InfoKind>) -> Device {
        Device { index, kind }
    }

    /// Returns `true` for devices that do nothing but encrypt: WireGuard's and IPsec's.
    pub(super) fn encrypts(&self) -> bool {
        matches!(self.kind, Some(InfoKind::Wireguard | InfoKind::Xfrm | InfoKind::Vti | InfoKind::Vti6))
    }

    /// Returns `true` also for TUN devices, behind which a program decides: OpenVPN, Nebula,
    /// WireGuard in user space.
    pub(super) fn may_encrypt(&self) -> bool {
        self.encrypts() || self.kind == Some(InfoKind::Tun)
    }
}

impl Devices {
    pub(super) fn open() -> Result<Devices, Errno> {
        // The default family is NETLINK_ROUTE.
        Asker::open(None).map(Devices)
    }

    /// Returns the device by which packets to an address leave. `None` if there is no route.
    pub(super) fn towards(&mut self, address: IpAddr) -> Result<Option<Device>, Errno> {
        if address.is_unspecified() {
            return Ok(None);
        }
        let mut question = RouteMessage::default();
        let (family, destination, bits) = match address {
            IpAddr::V4(v4) => (AddressFamily::Inet, RouteAddress::Inet(v4), 32),
            IpAddr::V6(v6) => (AddressFamily::Inet6, RouteAddress::Inet6(v6), 128),
        };
        question.header.address_family = family;
        question.header.destination_prefix_length = bits;
        question.attributes.push(RouteAttribute::Destination(destination));
        let routes = match self.0.ask(RouteNetlinkMessage::GetRoute(question), Answers::One) {
            Err(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::ACCESS | Errno::INVAL) => return Ok(None),
            answers => answers?,
        };
        let of_route = |route: &RouteNetlinkMessage| match route {
            RouteNetlinkMessage::NewRoute(route) => route.attributes.iter().find_map(|it| match it {
                RouteAttribute::Oif(index) => Some(*index),
                _ => None,
            }),
            _ => None,
        };
        let Some(index) = routes.iter().find_map(of_route) else {
            return Ok(None);
        };
        let mut question = LinkMessage::default();
        question.header.index = index;
        Ok(self.link(question)?.map(|link| Device { index, kind: kind(&link) }))
    }

    /// Returns `true` if there is a device of that name.
    pub(super) fn has(&mut self, name: &str) -> Result<bool, Errno> {
        let mut question = LinkMessage::default();
        question.attributes.push(LinkAttribute::IfName(name.to_owned()));
        Ok(self.link(question)?.is_some())
    }

    fn link(&mut self, question: LinkMessage) -> Result<Option<LinkMessage>, Errno> {
        let links = match self.0.ask(RouteNetlinkMessage::GetLink(question), Answers::One) {
            Err(Errno::NODEV) => return Ok(None),
            answers => answers?,
        };
        Ok(links.into_iter().find_map(|link| match link {
            RouteNetlinkMessage::NewLink(link) => Some(link),
            _ => None,
        }))
    }
}

fn kind(link: &LinkMessage) -> Option<InfoKind> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => infos.iter().find_map(|info| match info {
            LinkInfo::Kind(kind) => Some(kind.clone()),
            _ => None,
        }),
        _ => None,
    })
}
