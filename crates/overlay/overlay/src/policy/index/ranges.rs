//! The rules that name ranges of addresses or ports, by address or port. The bounds of all ranges
//! divide the keys into intervals whose keys are in the same ranges; a look-up is a binary search.
//!
//! ```text
//! rule 0   ├──────────────┤                 10.0.0.0/8
//! rule 1        ├────┤                      10.1.0.0/16
//!        {} {0} {0,1} {0} {}                the sets of the intervals
//! ```

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::rule_set::{Builder, RuleSet};

/// Rules by the keys that they name.
#[derive(Clone, Debug)]
pub(super) struct Ranges<K> {
    /// The first key of each interval, in ascending order, and the position of its set.
    intervals: Vec<(K, usize)>,
    /// The sets, each once. The first is that of keys before all intervals: empty.
    sets: Vec<RuleSet>,
}

/// A range of keys that a rule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range<K> {
    pub(super) first: K,
    /// The key after the last one. `None`: no key is after it.
    pub(super) end: Option<K>,
}

impl Range<IpAddr> {
    /// Returns the addresses of a prefix. The order of addresses is that of `IpAddr`: IPv4 first.
    pub(super) fn of_prefix(net: IpNet) -> Range<IpAddr> {
        let end = match net.broadcast() {
            IpAddr::V4(Ipv4Addr::BROADCAST) => Some(Ipv6Addr::UNSPECIFIED.into()),
            IpAddr::V4(last) => Some(Ipv4Addr::from(u32::from(last) + 1).into()),
            IpAddr::V6(last) => u128::from(last).checked_add(1).map(|next| Ipv6Addr::from(next).into()),
        };
        Range { first: net.network(), end }
    }
}

impl<K: Copy + Ord> Ranges<K> {
    /// Creates the look-up of ranges, each with its rule.
    pub(super) fn new(ranges: impl Iterator<Item = (Range<K>, usize)>) -> Ranges<K> {
        let mut changes = Vec::new();
        for (Range { first, end }, rule) in ranges {
            changes.push((first, rule, 1));
            changes.extend(end.map(|end| (end, rule, -1)));
        }
        changes.sort_unstable();
        let mut made = Ranges { intervals: Vec::new(), sets: vec![RuleSet::default()] };
        let mut known = HashMap::from([(RuleSet::default(), 0)]);
        // The ranges of a rule may overlap: the number of those that have the present key.
        let mut counts: HashMap<usize, i32> = HashMap::new();
        let mut present = Builder::default();
        for at_key in changes.chunk_by(|one, other| one.0 == other.0) {
            for (_, rule, change) in at_key {
                *counts.entry(*rule).or_default() += change;
            }
            for (_, rule, _) in at_key {
                match counts[rule] {
                    0 => present.remove(*rule),
                    _ => present.insert(*rule),
                }
            }
            let set = present.build();
            let next = made.sets.len();
            let at = *known.entry(set).or_insert_with_key(|set| {
                made.sets.push(set.clone());
                next
            });
            made.intervals.push((at_key[0].0, at));
        }
        made
    }

    /// Returns the rules that name a key.
    pub(super) fn of(&self, key: K) -> &RuleSet {
        let before = self.intervals.partition_point(|(first, _)| *first <= key);
        &self.sets[before.checked_sub(1).map_or(0, |at| self.intervals[at].1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_named_by_the_ranges_that_have_it() {
        // All pairs of ranges of a rule, and one of another rule.
        let ranges: Vec<Range<u8>> = (0..5)
            .flat_map(|first| (first + 1..5).map(Some).chain([None]).map(move |end| Range { first, end }))
            .collect();
        let has = |range: &Range<u8>, key| range.first <= key && range.end.is_none_or(|end| key < end);
        for one in &ranges {
            for two in &ranges {
                for other in &ranges {
                    let made = Ranges::new([(*one, 3), (*two, 3), (*other, 70)].into_iter());
                    for key in 0..6 {
                        let of_3 = (has(one, key) || has(two, key)).then_some(3);
                        let of_70 = has(other, key).then_some(70);
                        let expected: Vec<usize> = of_3.into_iter().chain(of_70).collect();
                        let found: Vec<usize> = made.of(key).iter().collect();
                        assert_eq!(found, expected, "{one:?} {two:?} {other:?} {key}");
                    }
                }
            }
        }
        assert!(Ranges::<u8>::new(std::iter::empty()).of(0).is_empty());
    }

    #[test]
    fn prefixes_have_their_first_and_last_addresses() {
        let texts = [
            "0.0.0.0/0",
            "10.50.1.7/24",
            "10.50.1.0/32",
            "255.255.255.255/32",
            "128.0.0.0/1",
            "::/0",
            "::/128",
            "fd00:50::/32",
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128",
            "8000::/1",
        ];
        let nets: Vec<IpNet> = texts.iter().map(|it| it.parse().unwrap()).collect();
        let made = Ranges::new(nets.iter().enumerate().map(|(rule, net)| (Range::of_prefix(*net), rule)));
        let edges = nets.iter().flat_map(|net| [net.network(), net.broadcast()]);
        let more = ["9.255.255.255", "10.50.0.255", "10.50.2.0", "fd00:4f::1", "fd00:51::"];
        for address in edges.chain(more.iter().map(|it| it.parse().unwrap())) {
            let expected: Vec<usize> =
                (0..nets.len()).filter(|rule| nets[*rule].contains(&address)).collect();
            assert_eq!(made.of(address).iter().collect::<Vec<_>>(), expected, "{address}");
        }
    }
}
