//! The present identity of a client, which may differ from its identity when it connected.
//!
//! The kernel records the user of a connection when it is made (SO_PEERCRED) and never changes it.
//! A program that connects as root and then changes its user, or passes the socket on, would keep
//! root's rights. Therefore no right is derived from that alone. The kernel also reports the sender
//! of each message (SCM_CREDENTIALS: the real user at that moment). A client never has more rights
//! than when it connected, nor more than when it sent the message. For requests that only root may
//! make, the broker also checks the present effective user and network namespace of the process.
//!
//! ```text
//!   connected as    sends as    is
//!   root            root        root
//!   root            games       games
//!   games           root        games      (its effective user was games)
//!   games           daemon      daemon
//! ```
//!
//! The control connection continues after such a change, because the process might be unable to
//! open another: it may have changed its root directory, or the broker may serve only its former
//! user. What it holds stays charged to the previous principal; new resources are charged to the
//! present one.

use shunt_sys::process_access::{self, Present};
use shunt_sys::seqpacket::Credentials;

use crate::principal::Principal;

/// Returns the present user of a client that connected as `connected` and sent its last message as
/// `sender`.
pub(crate) fn user(connected: u32, sender: u32) -> u32 {
    if sender == 0 { connected } else { sender }
}

/// Returns whether a client that has a privileged principal may still be answered as such.
pub(crate) fn is_still(principal: Principal, sender: Credentials) -> bool {
    if !principal.is_privileged() {
        return true;
    }
    // The broker may be unable to see the process, for example in another pid namespace. Then the
    // kernel's report about the sender decides.
    let own = process_access::own_network();
    let is_it = |present: Present| present.user == principal.uid && Some(present.network) == own;
    process_access::has_thread(sender.pid, is_it).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_never_more_than_when_it_connected_or_when_it_spoke() {
        for (connected, sender, is) in
            [(0, 0, 0), (0, 65_534, 65_534), (1000, 0, 1000), (1000, 1000, 1000), (1000, 12, 12)]
        {
            assert_eq!(user(connected, sender), is, "{connected} and {sender}");
        }
    }
}
