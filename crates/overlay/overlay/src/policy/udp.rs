//! The rules for UDP, resolved to addresses.

use std::ops::RangeInclusive;

use ipnet::IpNet;

use super::resolved::without;
use super::{Action, Ends, InEffect, Ports, Protocol, Rule};

/// A rule for UDP. The first one that matches decides; if none does, the datagram is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UdpRule {
    /// `None`: every address.
    pub(crate) from: Option<Vec<IpNet>>,
    pub(crate) to: Option<Vec<IpNet>>,
    pub(crate) ports: Option<Vec<RangeInclusive<u16>>>,
    pub(crate) source_ports: Option<Vec<RangeInclusive<u16>>>,
    pub(crate) verdict: UdpVerdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UdpVerdict {
    Accept,
    /// The sender gets an ICMP error.
    Reject,
    Drop,
}

impl InEffect {
    /// Returns the rules for UDP. A rule that may match, because labels are not known, is followed by
    /// one that accepts: the overlay's own policy decides.
    pub(crate) fn udp_rules(&self, overlay: &[IpNet]) -> Vec<UdpRule> {
        let rules = self.policy.rules.iter().filter(|rule| rule.protocol == Protocol::Udp);
        rules.flat_map(|rule| self.udp_rule(rule, overlay)).collect()
    }

    fn udp_rule(&self, rule: &Rule, overlay: &[IpNet]) -> Vec<UdpRule> {
        let (from, possible_from) = self.both(rule.from.as_deref(), overlay);
        let (to, possible_to) = self.both(rule.to.as_deref(), overlay);
        let ports = rule.ports.as_ref().map(|ports| {
            let ranges = ports.iter().filter_map(|it| match it {
                Ports::Range(range) => Some(range.clone()),
                Ports::Named(_) => None,
            });
            ranges.collect()
        });
        let verdict = match rule.action {
            Action::Allow | Action::Overlay => UdpVerdict::Accept,
            Action::Deny => UdpVerdict::Reject,
            Action::Drop => UdpVerdict::Drop,
        };
        let certain = UdpRule { from, to, ports, source_ports: rule.source_ports.clone(), verdict };
        if possible_from == certain.from && possible_to == certain.to {
            return vec![certain];
        }
        let possible =
            UdpRule { from: possible_from, to: possible_to, verdict: UdpVerdict::Accept, ..certain.clone() };
        vec![certain, possible]
    }

    /// Returns the addresses that an entry matches for certain, and those that it may match.
    fn both(&self, ends: Option<&[Ends]>, overlay: &[IpNet]) -> (Option<Vec<IpNet>>, Option<Vec<IpNet>>) {
        let Some(ends) = ends else { return (None, None) };
        let resolved = self.resolve(ends);
        let mut possible = [resolved.certain.clone(), resolved.possible].concat();
        if resolved.unknown {
            let known: Vec<IpNet> = self.workloads.known().map(|(address, _)| address.into()).collect();
            possible.extend(overlay.iter().flat_map(|prefix| without(*prefix, &known)));
        }
        (Some(resolved.certain), Some(possible))
    }
}

#[cfg(test)]
mod tests {
    use super::super::in_effect::tests::in_effect;
    use super::*;

    #[test]
    fn rules_for_udp_are_resolved_and_accept_what_is_not_known() {
        let policy = in_effect(
            "default = 'deny'\n[[rule]]\nname = 'tcp'\naction = 'deny'\n\
             [[rule]]\nname = 'dns'\nprotocol = 'udp'\naction = 'allow'\nports = [53]\n\
             [[rule]]\nname = 'db'\nprotocol = 'udp'\naction = 'drop'\nfrom = [{ labels = 'app=web' }]\nto = ['10.50.2.0/24']\n",
        );
        let nets = |texts: &[&str]| Some(texts.iter().map(|it| it.parse().unwrap()).collect::<Vec<IpNet>>());
        let rules = policy.udp_rules(&["10.50.0.0/30".parse().unwrap(), "10.50.1.2/31".parse().unwrap()]);
        let rule = |from, to, ports, verdict| UdpRule { from, to, ports, source_ports: None, verdict };
        assert_eq!(
            rules,
            [
                rule(None, None, Some(vec![53..=53]), UdpVerdict::Accept),
                rule(nets(&["10.50.1.2/32"]), nets(&["10.50.2.0/24"]), None, UdpVerdict::Drop),
                rule(
                    nets(&["10.50.1.2/32", "10.50.0.0/30", "10.50.1.3/32"]),
                    nets(&["10.50.2.0/24"]),
                    None,
                    UdpVerdict::Accept
                ),
            ]
        );
        assert!(in_effect("default = 'deny'").udp_rules(&[]).is_empty());
    }
}
