//! The host's outgoing IPsec policies (xfrm): which packets they encrypt.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_xfrm::{Selector, XfrmAttrs, XfrmMessage};
use rustix::net::netlink;
use shunt_sys::Errno;

use super::netlink::{Answers, Asker};

/// Lists the policies of the host's network namespace. `None` if the kernel has no IPsec.
#[derive(Debug)]
pub(super) struct Ipsec(Option<Asker>);

/// The outgoing policies, the one with precedence first.
#[derive(Debug, Default)]
pub(super) struct Policies(Vec<Policy>);

/// What one policy does, and with which packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) priority: u32,
    pub(super) effect: Effect,
    /// `None` for all addresses.
    pub(super) source: Option<IpNet>,
    pub(super) destination: Option<IpNet>,
    /// 0 for all protocols.
    pub(super) protocol: u8,
    /// It selects only packets of some ports, with a mark, or of one device.
    pub(super) is_narrowed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Effect {
    /// It lets packets pass as they are, or drops them, or only authenticates them.
    Plain,
    /// It encrypts if there is a key, or else lets packets pass as they are.
    EncryptsIfPossible,
    Encrypts,
}

impl Ipsec {
    pub(super) fn open() -> Result<Ipsec, Errno> {
        match Asker::open(Some(netlink::XFRM)) {
            Err(Errno::PROTONOSUPPORT) => Ok(Ipsec(None)),
            opened => opened.map(|asker| Ipsec(Some(asker))),
        }
    }

    pub(super) fn policies(&mut self) -> Result<Policies, Errno> {
        let Some(asker) = &mut self.0 else {
            return Ok(Policies::default());
        };
        let found = asker.ask(XfrmMessage::GetPolicy(Default::default()), Answers::All)?;
        Ok(Policies::new(found.into_iter().filter_map(|message| match message {
            XfrmMessage::AddPolicy(policy) if policy.user_policy_info.direction == OUT => {
                let info = &policy.user_policy_info;
                Some(Policy::of(&info.selector, (info.priority, info.action), &policy.nlas))
            }
            _ => None,
        })))
    }
}

impl Policies {
    pub(super) fn new(policies: impl IntoIterator<Item = Policy>) -> Policies {
        let mut policies: Vec<_> = policies.into_iter().collect();
        policies.sort_by_key(|policy| policy.priority);
        Policies(policies)
    }

    /// Returns `true` if some packets to one of these addresses may be encrypted.
    pub(super) fn may_protect(&self, destinations: [IpAddr; 2]) -> bool {
        self.0.iter().any(|policy| {
            policy.effect != Effect::Plain
                && destinations.into_iter().any(|address| covers(policy.destination, address))
        })
    }

    /// Returns `true` if all TCP segments from this host to that address are encrypted.
    pub(super) fn protect_tcp(&self, from: IpAddr, to: IpAddr) -> bool {
        let mut selecting = self.0.iter().filter(|policy| policy.may_select_tcp(from, to));
        // A narrower one that comes first may let some segments pass as they are.
        selecting.next().is_some_and(|first| first.effect == Effect::Encrypts && !first.is_narrowed)
    }
}

impl Policy {
    fn of(selector: &Selector, (priority, action): (u32, u8), attributes: &[XfrmAttrs]) -> Policy {
        let templates = attributes.iter().filter_map(|attribute| match attribute {
            XfrmAttrs::Template(templates) => Some(templates),
            _ => None,
        });
        let encrypting = templates.flatten().filter(|template| template.id.proto == ESP);
        let effect = encrypting.map(|template| match template.optional {
            0 => Effect::Encrypts,
            _ => Effect::EncryptsIfPossible,
        });
        let is_marked = attributes.iter().any(|attribute| match attribute {
            XfrmAttrs::Mark(mark) => mark.mask != 0,
            XfrmAttrs::IfId(interface) => *interface != 0,
            _ => false,
        });
        let net = |address: [u8; 16], bits: u8| match selector.family {
            INET => IpNet::new(IpAddr::from(*address.first_chunk::<4>().expect("it has 16")), bits).ok(),
            INET6 => IpNet::new(IpAddr::from(address), bits).ok(),
            _ => None,
        };
        Policy {
            priority,
            effect: effect.max().filter(|_| action == ALLOW).unwrap_or(Effect::Plain),
            source: net(selector.saddr.addr, selector.prefixlen_s),
            destination: net(selector.daddr.addr, selector.prefixlen_d),
            protocol: selector.proto,
            is_narrowed: is_marked
                || selector.ifindex != 0
                || selector.sport_mask != 0
                || selector.dport_mask != 0,
        }
    }

    fn may_select_tcp(&self, from: IpAddr, to: IpAddr) -> bool {
        covers(self.source, from) && covers(self.destination, to) && [0, TCP].contains(&self.protocol)
    }
}

fn covers(prefix: Option<IpNet>, address: IpAddr) -> bool {
    prefix.is_none_or(|prefix| prefix.contains(&address))
}

/// XFRM_POLICY_OUT, XFRM_POLICY_ALLOW, and the numbers of protocols and families.
const OUT: u8 = 1;
const ALLOW: u8 = 0;
const ESP: u8 = 50;
const TCP: u8 = 6;
const INET: u16 = 2;
const INET6: u16 = 10;
