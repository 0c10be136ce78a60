//! The answer that a router gives to connections which ask for its containers' host: its own address
//! and ports, encrypted under the cluster's key. So containers that see the segments do not learn
//! their host's address, and cannot make an answer. They can repeat one that they have seen.
//!
//! Before it is encrypted, an answer for an IPv4 host has seven bytes, and one for an IPv6 host
//! fifteen: the number of ports, the first port (2), and the address. Of an IPv6 address the first
//! four bytes are left out. They are those of `hosts`, which all routers have in common.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use shunt_kernel::hint::ANSWER;
use shunt_key::{Key, Keys};

use crate::config::MAX_PORTS;
use crate::map::Router;

/// The role of the key.
const ROLE: &[u8] = b"shunt overlay hint";
/// The number of bytes of an IPv6 address that an answer leaves out.
const COMMON: usize = 4;

/// Returns the answer that names a router.
pub(super) fn seal(key: &Key, router: Router) -> [u8; ANSWER] {
    let mut value = vec![router.ports as u8];
    value.extend(router.address.port().to_be_bytes());
    match router.address.ip() {
        IpAddr::V4(address) => value.extend(address.octets()),
        IpAddr::V6(address) => value.extend(&address.octets()[COMMON..]),
    }
    key.seal_block(ROLE, &value)
}

/// Returns the router that an answer names. Returns `None` if no router with one of these keys has
/// made it, or if it is for a host outside of `hosts`.
pub(super) fn open(keys: &Keys, answer: &[u8; ANSWER], hosts: &[IpNet]) -> Option<Router> {
    keys.all().find_map(|key| read(&key.open_block(ROLE, answer)?, hosts))
}

fn read(value: &[u8], hosts: &[IpNet]) -> Option<Router> {
    let (&[ports, high, low], address) = value.split_first_chunk()?;
    let ip = hosts.iter().find_map(|net| {
        let ip = match net {
            IpNet::V4(_) => IpAddr::from(<[u8; 4]>::try_from(address).ok()?),
            IpNet::V6(net) => {
                let mut octets = net.addr().octets();
                let (_, own) = octets.split_at_mut(COMMON);
                own.copy_from_slice(&<[u8; 12]>::try_from(address).ok()?);
                Ipv6Addr::from(octets).into()
            }
        };
        net.contains(&ip).then_some(ip)
    })?;
    let (port, ports) = (u16::from_be_bytes([high, low]), u16::from(ports));
    let is_router = port != 0 && (1..=MAX_PORTS).contains(&ports) && port.checked_add(ports - 1).is_some();
    is_router.then_some(Router { address: SocketAddr::new(ip, port), ports })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn an_answer_names_its_router_to_those_who_have_the_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        shunt_key::new_key(&path).unwrap();
        let keys = Keys::read(&path).unwrap();
        let hosts = nets(&["192.168.0.0/24", "2001:db8:7::/48", "2001:db8:8::/48"]);
        for text in
            ["192.168.0.2:7450", "192.168.0.2:65472-65535", "[2001:db8:7::5]:7450-7453", "[2001:db8:8::1]:1"]
        {
            let router: Router = text.parse().unwrap();
            let answer = seal(keys.own(), router);
            assert_eq!(open(&keys, &answer, &hosts), Some(router), "{text}");
            assert_eq!(open(&keys, &answer, &nets(&["192.168.1.0/24", "2001:db8:9::/48"])), None, "{text}");
            assert_eq!(open(&keys, &seal(&Key::from([1; 32]), router), &hosts), None, "{text}");
        }
        // A next key may be that of another router already.
        shunt_key::rotate(&path, shunt_key::Step::Next).unwrap();
        let both = Keys::read(&path).unwrap();
        shunt_key::rotate(&path, shunt_key::Step::UseNext).unwrap();
        let used = Keys::read(&path).unwrap();
        let router: Router = "192.168.0.2:7450".parse().unwrap();
        assert_eq!(open(&both, &seal(used.own(), router), &hosts), Some(router));
    }

    #[test]
    fn bytes_that_no_router_has_made_name_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        shunt_key::new_key(&path).unwrap();
        let keys = Keys::read(&path).unwrap();
        let hosts = nets(&["192.168.0.0/24", "2001:db8:7::/48"]);
        let mut random = Random(5);
        for _ in 0..20_000 {
            let answer = std::array::from_fn(|_| random.below(256) as u8);
            assert_eq!(open(&keys, &answer, &hosts), None);
        }
        let own = [192, 168, 0, 2];
        for (ports, port) in [(0, 7450), (65, 7450), (1, 0), (2, 65535)] {
            let [high, low] = u16::to_be_bytes(port);
            assert_eq!(read(&[&[ports, high, low][..], &own].concat(), &hosts), None, "{ports} from {port}");
        }
        for length in 0..16 {
            let is_read = read(&vec![1; length], &nets(&["0.0.0.0/0", "2001:db8::/32"])).is_some();
            assert_eq!(is_read, length == 7 || length == 15, "{length}");
        }
    }
}
