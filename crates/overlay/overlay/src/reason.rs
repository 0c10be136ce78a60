//! The reasons for which a connection stays on the overlay. `shunt overlay status` shows their
//! labels, and routers exchange their codes.

use serde::{Deserialize, Serialize};

use crate::policy::Denial;

macro_rules! reasons {
    ($($name:ident = $code:literal, $label:literal, $sentence:literal;)*) => {
        /// The reason for which a connection stays on the overlay.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub(crate) enum Reason {
            $(#[doc = $sentence] $name,)*
        }

        impl Reason {
            pub(crate) const ALL: &[Reason] = &[$(Reason::$name),*];

            /// Returns the name in `shunt overlay status` and docs/overlay.md.
            pub(crate) fn label(self) -> &'static str {
                match self {
                    $(Reason::$name => $label,)*
                }
            }

            /// Returns one sentence for the user.
            pub(crate) fn explanation(self) -> &'static str {
                match self {
                    $(Reason::$name => $sentence,)*
                }
            }

            pub(crate) fn code(self) -> u8 {
                match self {
                    $(Reason::$name => $code,)*
                }
            }

            /// Returns the reason with that code. `None` if another version defined it.
            pub(crate) fn from_code(code: u8) -> Option<Reason> {
                match code {
                    $($code => Some(Reason::$name),)*
                    _ => None,
                }
            }
        }
    };
}

reasons! {
    SameHost = 1, "same-host", "Both containers are on this host.";
    UnknownHost = 2, "unknown-host", "No host of the configuration, etcd, the Kubernetes API or in-band discovery has that address.";
    NotSupervised = 3, "not-supervised", "No supervised program listens there.";
    Ambiguous = 4, "ambiguous", "Two network namespaces of the host have that address.";
    RouterSilent = 5, "router-silent", "The router of the other host did not answer in time, or at all.";
    Stranger = 6, "stranger", "What answered is no router with the same key and a common version of the protocol.";
    Socket = 7, "socket", "The socket is bound to a device, in a state of its own, or of a namespace that anybody could have made.";
    Options = 8, "options", "The socket has an option that the other one does not take.";
    Shared = 9, "shared", "The program has several descriptors of the socket, or may have it in an io_uring, or has too many to look at.";
    Used = 10, "used", "Bytes had been sent before the program looked whether it was connected.";
    Late = 11, "late", "One end was there before the other, and had stopped waiting.";
    Impatient = 12, "impatient", "The program did not look in time whether it was connected.";
    NotOffered = 13, "not-offered", "The client's host did not offer it.";
    NotCommitted = 14, "not-committed", "The client's host took its offer back.";
    Mismatch = 15, "mismatch", "What was offered is another connection with the same addresses.";
    NotFound = 16, "not-found", "The connection that was offered is not there, under those addresses.";
    Busy = 17, "busy", "The share of its network namespace is used up.";
    Failed = 18, "failed", "The kernel refused something.";
    NotConnected = 19, "not-connected", "The overlay connection was not made.";
    Denied = 20, "denied", "The policy of one of the hosts forbids it, and says so.";
    Dropped = 21, "dropped", "The policy of one of the hosts forbids it, and says nothing.";
    PacketPolicy = 22, "packet-policy", "A rule of the policy of one of the hosts wants its packets to be seen.";
    Family = 23, "family", "The hosts' addresses are of IPv6, and a program's socket is of IPv4.";
    Ports = 25, "ports", "This host has no free port for another connection to that host's router.";
    Encrypted = 26, "encrypted", "The overlay to that host is encrypted, and the network between the hosts is not.";
    UnknownLabels = 27, "unknown-labels", "A rule of the policy of one of the hosts selects containers by labels, and no source of labels names this container.";
    Limit = 28, "limit", "A rule limits the container, and this host cannot.";
    Discovering = 29, "discovering", "The host of that container is being looked for, by this connection or an earlier one.";
    NotTranslated = 30, "not-translated", "This host's kernel has not translated the service's address.";
    Brief = 24, "brief", "Connections from there to that place have lately been over before moving them had paid.";
}

impl Reason {
    /// Returns a short advice for the user. docs/overlay.md has a longer one.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Reason::SameHost => {
                "Start both with `shunt run`, or `docker run --runtime=shunt`: they share memory then."
            }
            Reason::UnknownHost => {
                "Add it to `containers` of a [[host]] in the configuration of every router, or look whether the source that is to name it works: `shunt doctor`."
            }
            Reason::Discovering => {
                "Nothing: later connections to it are moved. If they are not, `now.in-band` in `shunt overlay status --json` counts the hints by their outcome."
            }
            Reason::NotSupervised => {
                "Start the server with `shunt overlay run`, or `docker run --runtime=shunt`; look whether it, or whoever shares its port, has an io_uring or was started otherwise."
            }
            Reason::Ambiguous => "Give each container an address of its own.",
            Reason::RouterSilent => {
                "Look whether the other host's router runs, its port is open and its key the same: `shunt doctor`."
            }
            Reason::NotTranslated => {
                "Connect to the service on a node whose kube-proxy translates its address (in the modes iptables, nftables and ipvs); leave addresses out of `[services]` that are no service's."
            }
            Reason::Stranger => {
                "Copy the same key to all hosts, and update routers that are more than one version older."
            }
            Reason::Shared => "Nothing, if the program needs its copies of the descriptor.",
            Reason::Used => {
                "A longer `hold-ms` has connect wait for it; or have the program look whether it is connected before it sends, by SO_ERROR."
            }
            Reason::Late | Reason::Impatient | Reason::NotOffered | Reason::NotCommitted => {
                "Start the client with `shunt overlay run` if it is not; a longer `patience-ms` gives slow programs time."
            }
            Reason::Family => {
                "Have the program use an IPv6 socket, or give the hosts IPv4 addresses in the configuration."
            }
            Reason::Ports => {
                "Set `ports` of that [[host]] in the configuration of every router, or widen this host's net.ipv4.ip_local_port_range."
            }
            Reason::Brief => {
                "Have the program keep its connections (keep-alive, a pool); `move-brief = true` in the configuration moves such ones all the same."
            }
            Reason::Encrypted => {
                "Nothing, if it has to be encrypted. Otherwise set `encrypted = false` in the configuration of both routers."
            }
            Reason::Busy => "Have fewer connections begin at once in one container.",
            Reason::Limit => {
                "Look at `now.limits` in `shunt overlay status --json`: the router needs tc, and a device without a queueing discipline of its own."
            }
            Reason::UnknownLabels => {
                "Look at `now.labels` in `shunt overlay status --json`; set `label-sources` in the configuration of every router, or use addresses in the rule."
            }
            Reason::Denied | Reason::Dropped | Reason::PacketPolicy => {
                "Change the policy, if it should be otherwise: `shunt overlay policy show` on both hosts."
            }
            _ => "Nothing; docs/overlay.md says more about it.",
        }
    }

    /// Returns the denial that the program gets, if there is to be no connection at all.
    pub(crate) fn denial(self) -> Option<Denial> {
        match self {
            Reason::Denied => Some(Denial::Refused),
            Reason::Dropped => Some(Denial::TimedOut),
            _ => None,
        }
    }
}

impl From<Denial> for Reason {
    fn from(denial: Denial) -> Reason {
        match denial {
            Denial::Refused => Reason::Denied,
            Denial::TimedOut => Reason::Dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_one_reasons_and_every_label_is_its_name_in_messages() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_code(reason.code()), Some(*reason));
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.label());
            let page = include_str!("../../../../docs/overlay.md");
            assert!(page.contains(&format!("`{}`", reason.label())), "docs/overlay.md explains {reason:?}");
        }
        assert_eq!(Reason::from_code(0), None);
    }
}
