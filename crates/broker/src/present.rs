//! Who a client is now, whoever it was when it connected.
//!
//! The kernel keeps with a connection the user that it was made by (SO_PEERCRED), for ever: a program that connects as root and becomes
//! another user, or hands the connection to one, would go on as root. So no right is derived from that alone. The kernel also says of
//! each message which user has sent it (SCM_CREDENTIALS: the real one, as it was at that moment), and a client is what both say: it never has
//! more than when it connected, and never more than when it spoke. What is open to root only is answered once more by what the process is
//! at that moment: its effective user, and its network namespace.
//!
//! ```text
//!   connected as    sends as    is
//!   root            root        root
//!   root            nobody      nobody
//!   nobody          root        nobody     (its effective user was nobody)
//!   nobody          games       games
//! ```
//!
//! The conversation goes on meanwhile: a process that has left its root directory, or whose broker is its former user's, could not
//! begin another. What it holds stays charged to whom it was charged to, and what it takes from then on is charged to who it is.

use shunt_sys::seqpacket::Credentials;
use shunt_sys::standing::{self, Present};

use crate::principal::Principal;

/// Returns the user that a client is who connected as `connected` and has sent its last message as `sender`.
pub(crate) fn user(connected: u32, sender: u32) -> u32 {
    if sender == 0 { connected } else { sender }
}

/// Returns whether a client may be answered as root, or as the broker's own user, now.
pub(crate) fn is_still(principal: Principal, sender: Credentials) -> bool {
    if !principal.is_privileged() {
        return true;
    }
    // One that the broker cannot see is none of its own network namespace's, or is hidden from it: the kernel has said who sent this.
    let own = standing::own_network();
    let is_it = |present: Present| present.user == principal.uid && Some(present.network) == own;
    standing::has_thread(sender.pid, is_it).unwrap_or(true)
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
