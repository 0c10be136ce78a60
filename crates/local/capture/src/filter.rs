//! Selects the links and connections to capture.

use std::net::{IpAddr, SocketAddr};

/// Each list that is not empty must match at least one end.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Ports.
    pub ports: Vec<u16>,
    /// Addresses.
    pub addresses: Vec<IpAddr>,
    /// Process ids.
    pub pids: Vec<u32>,
    /// Program names.
    pub programs: Vec<String>,
}

impl Filter {
    /// Returns `true` if links between two programs may have connections that match.
    pub(crate) fn has_link(&self, pids: [u32; 2], programs: [&str; 2]) -> bool {
        fits(&self.pids, pids) && fits_by(&self.programs, programs, |wanted, one| wanted == one)
    }

    /// Returns `true` if a connection with these addresses, as each end sees them, matches.
    pub(crate) fn has_connection(&self, addresses: [[SocketAddr; 2]; 2]) -> bool {
        let all = addresses.concat();
        fits(&self.ports, all.iter().map(SocketAddr::port))
            && fits(&self.addresses, all.iter().map(SocketAddr::ip))
    }
}

fn fits<T: PartialEq>(wanted: &[T], found: impl IntoIterator<Item = T>) -> bool {
    fits_by(wanted, found, |wanted, one| wanted == one)
}

fn fits_by<T, U>(wanted: &[T], found: impl IntoIterator<Item = U>, is: impl Fn(&T, &U) -> bool) -> bool {
    wanted.is_empty() || found.into_iter().any(|one| wanted.iter().any(|wanted| is(wanted, &one)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_list_is_for_either_end_and_all_must_fit() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let pair = [address("10.0.0.1:80"), address("10.0.0.2:999")];
        let filter = Filter {
            ports: vec![80, 81],
            addresses: vec![[10, 0, 0, 2].into()],
            pids: vec![7],
            programs: vec!["nginx".into()],
        };
        assert!(
            Filter::default().has_connection([pair, pair]) && Filter::default().has_link([1, 2], ["a", "b"])
        );
        assert!(filter.has_connection([pair, pair]));
        assert!(!filter.has_connection([[pair[0]; 2]; 2]) && !filter.has_connection([[pair[1]; 2]; 2]));
        assert!(filter.has_link([7, 8], ["curl", "nginx"]));
        assert!(!filter.has_link([6, 8], ["curl", "nginx"]) && !filter.has_link([7, 8], ["curl", "nginx2"]));
    }
}
