//! Addresses in shared layouts and messages: sixteen bytes, IPv4-mapped where it is IPv4.

use std::net::{IpAddr, Ipv6Addr};

/// How an address is written.
pub fn to_octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// And read: one of IPv4 as that, whatever kind of socket has it.
pub fn from_octets(octets: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(octets).to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_went() {
        for address in ["127.0.0.1", "0.0.0.0", "::", "::1", "2001:db8::1"] {
            let ip: IpAddr = address.parse().unwrap();
            assert_eq!(from_octets(to_octets(ip)), ip);
        }
        assert_eq!(from_octets(to_octets("::ffff:10.0.0.1".parse().unwrap())).to_string(), "10.0.0.1");
    }
}
