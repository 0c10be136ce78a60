//! Addresses in shared layouts and messages: sixteen bytes, where an IPv4 address is IPv4-mapped.

use std::net::{IpAddr, Ipv6Addr};

/// Returns the sixteen bytes of an address.
pub fn to_octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Returns the address of sixteen bytes: an IPv4-mapped one as IPv4, whatever kind of socket has
/// it.
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
