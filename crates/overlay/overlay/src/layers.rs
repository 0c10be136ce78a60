//! The policies of which the one in effect consists: the file's or the one that was applied, and the
//! cluster's NetworkPolicies.
//!
//! | NetworkPolicies | in effect |
//! | --- | --- |
//! | not configured | the own policy |
//! | not read yet | the overlay for what the own rules without a direction leave open |
//! | read | the own policy's rules, then theirs |
//!
//! So a connection that a NetworkPolicy forbids never leaves the overlay because the API server cannot
//! be reached. Connections of a former router that left it before continue meanwhile.

use std::sync::Arc;

use crate::policy::Policy;

/// The policies.
#[derive(Clone, Debug)]
pub(crate) struct Layers {
    own: Arc<Policy>,
    network: Option<Arc<Policy>>,
    is_read: bool,
}

impl Layers {
    pub(crate) fn new(own: Arc<Policy>, has_network_policies: bool) -> Layers {
        let network = has_network_policies.then(|| Arc::new(Policy::overlay(UNREAD)));
        Layers { own, network, is_read: !has_network_policies }
    }

    /// Returns the policy of the file, or the one that was applied.
    pub(crate) fn own(&self) -> &Arc<Policy> {
        &self.own
    }

    pub(crate) fn set_own(&mut self, own: Arc<Policy>) {
        self.own = own;
    }

    pub(crate) fn set_network(&mut self, network: Arc<Policy>) {
        self.network = Some(network);
        self.is_read = true;
    }

    /// Returns `false` before the NetworkPolicies have been read.
    pub(crate) fn is_read(&self) -> bool {
        self.is_read
    }

    /// Returns the policy that the NetworkPolicies have become.
    pub(crate) fn network(&self) -> Option<&Policy> {
        self.network.as_deref()
    }

    /// Returns all of it as one policy.
    pub(crate) fn all(&self) -> Arc<Policy> {
        match &self.network {
            Some(network) => Arc::new(self.own.with(network)),
            None => self.own.clone(),
        }
    }
}

/// The name of the rule that applies before the NetworkPolicies have been read.
const UNREAD: &str = "NetworkPolicies are not read yet";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::policy::{Denial, Flow, InEffect, Verdict};

    #[test]
    fn nothing_leaves_the_overlay_before_network_policies_are_read() {
        let policy = |text: &str| Arc::new(Policy::parse(Path::new("f"), text).unwrap());
        let flow = Flow {
            source: "10.50.1.2".parse().unwrap(),
            source_port: None,
            destination: "10.50.2.2:80".parse().unwrap(),
        };
        let verdict = |layers: &Layers| InEffect::new(layers.all(), Arc::default()).verdict(flow);
        let denied = Verdict::Deny(Denial::Refused);
        let mut layers = Layers::new(policy("default = 'allow'"), false);
        assert!(matches!(verdict(&layers), Verdict::Allow(_)));
        assert!(layers.is_read());
        layers = Layers::new(policy("default = 'allow'"), true);
        assert!(!layers.is_read());
        assert_eq!(verdict(&layers), Verdict::Overlay);
        layers.set_own(policy("[[rule]]\nname = 'a'\naction = 'deny'\nports = [80]"));
        assert_eq!(verdict(&layers), denied);
        assert_eq!(layers.own().names().collect::<Vec<_>>(), ["a"]);
        layers.set_own(policy("default = 'allow'"));
        layers.set_network(policy("[[rule]]\nname = 'n'\naction = 'deny'\ndirection = 'ingress'"));
        assert!(layers.is_read());
        assert_eq!(verdict(&layers), denied);
        layers.set_network(policy(""));
        assert!(matches!(verdict(&layers), Verdict::Allow(_)));
    }
}
