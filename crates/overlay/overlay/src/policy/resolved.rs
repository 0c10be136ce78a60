//! The addresses that an entry of `from` or `to` matches, as far as they are known.

use ipnet::IpNet;

use super::selector::Match;
use super::{Ends, Except, InEffect};

/// The addresses of `from` or `to`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Resolved {
    pub(super) certain: Vec<IpNet>,
    /// Addresses of known containers that it may match.
    pub(super) possible: Vec<IpNet>,
    /// It may match each address of the overlay whose container is not known.
    pub(super) unknown: bool,
}

impl InEffect {
    pub(super) fn resolve(&self, ends: &[Ends]) -> Resolved {
        let mut resolved = Resolved::default();
        for it in ends {
            match it {
                Ends::Prefix(net) => resolved.certain.push(*net),
                Ends::Except(Except { prefix, except }) => resolved.certain.extend(without(*prefix, except)),
                Ends::Selected(_) => {
                    resolved.unknown = true;
                    for (address, _) in self.workloads.known() {
                        match it.has(address, &self.workloads) {
                            Match::No => {}
                            Match::Maybe => resolved.possible.push(address.into()),
                            Match::Yes => resolved.certain.push(address.into()),
                        }
                    }
                }
            }
        }
        resolved
    }
}

/// Returns the prefixes that together have the addresses of `whole` that no `except` has.
pub(super) fn without(whole: IpNet, except: &[IpNet]) -> Vec<IpNet> {
    if except.iter().any(|it| it.contains(&whole)) {
        return Vec::new();
    }
    let inner: Vec<IpNet> = except.iter().copied().filter(|it| whole.contains(it)).collect();
    if inner.is_empty() {
        return vec![whole];
    }
    // Another prefix is within this one, so it can be divided.
    let halves = whole.subnets(whole.prefix_len() + 1).expect("it is no single address");
    halves.flat_map(|half| without(half, &inner)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_without_others_is_divided() {
        let nets = |texts: &[&str]| texts.iter().map(|it| it.parse().unwrap()).collect::<Vec<IpNet>>();
        let without = |whole: &str, except: &[&str]| without(whole.parse().unwrap(), &nets(except));
        assert_eq!(without("10.0.0.0/30", &["10.0.0.1/32"]), nets(&["10.0.0.0/32", "10.0.0.2/31"]));
        assert_eq!(without("10.0.0.0/30", &["10.1.0.0/16"]), nets(&["10.0.0.0/30"]));
        assert!(without("10.0.0.0/30", &["10.0.0.0/8"]).is_empty());
        assert_eq!(without("fd00::/127", &["fd00::1/128", "10.0.0.0/8"]), nets(&["fd00::/128"]));
        assert_eq!(without("0.0.0.0/0", &["10.50.0.0/16"]).len(), 16);
    }
}
