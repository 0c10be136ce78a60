//! The end of connections and of links: what the broker receives, and when memory is unmapped.

use shunt_abi::control::{Leave, Release, Request};

use super::{CONTROL, Control, Effect};
use crate::epoll;
use crate::socket::links::{Attachment, Identity, Link, Peer, Pin};
use crate::socket::sharing;
use crate::socket::sharing::Heirs;

/// The number of detached connections whose other holders are checked at a time.
const FEW: usize = 8;
/// The epoch of the broker that made a link, the broker's id of the link, and this process's side.
pub(super) type LinkName = (u32, u64, u32);

/// Reports to the broker that this process does not use the connection at `at`, where no byte was
/// moved. The pin keeps the link's identity until the message is queued.
pub(crate) fn release(at: &Pin) {
    release_after((**at, Heirs::None));
}

/// Reports to the broker that this process has detached from a connection. If child processes may
/// still drain the lanes, the message is a `Leave`, and the broker does not reuse the lanes yet.
/// The `Release` follows when no child can drain them any more.
pub(crate) fn release_after((at, heirs): (Attachment, Heirs)) {
    let mut control = CONTROL.lock();
    control.release_drained();
    if control.session.epoch() != at.link.epoch {
        return;
    }
    let (link, conn, side) = (at.link.id, at.conn as u32, at.link.side as u32);
    let release = Release { link, conn, side };
    if let Heirs::None = heirs {
        return control.send_or_queue(Request::Release(release));
    }
    control.send_or_queue(Request::Leave(Leave { link, conn, side }));
    // For children of a fork that the shim did not see, no `Release` follows. The broker frees the
    // connection when this process ends.
    if let Heirs::OfRow(row) = heirs
        && let Some(conversation) = control.session.conversation_mut()
    {
        conversation.draining.push_back((row, release));
    }
}

/// Unmaps a link that will not be used again. Every caller that may have been the last user of the
/// link calls this.
pub(crate) fn retire(link: &'static Link) {
    {
        let mut control = CONTROL.lock();
        // The thread that removes the link from the map retires it. The structure may have been
        // reused for another link since the caller's check.
        if !link.is_idle_for_good() || control.links.remove(&link_name(link)).is_none() {
            return;
        }
    }
    // No epoll instance may use the link when it is unmapped.
    epoll::drop_link(link);
    link.unmap();
    let mut control = CONTROL.lock();
    control.spare_links.push(link);
    control.spare_if_unused(link.peer);
}

impl Control {
    /// Sends the pending `Release` of detached connections that no other process can drain any
    /// more.
    pub(super) fn release_drained(&mut self) {
        let waiting = self.session.conversation().map_or(0, |conversation| conversation.draining.len());
        for _ in 0..waiting.min(FEW) {
            let Some(conversation) = self.session.conversation_mut() else { return };
            let Some((row, release)) = conversation.draining.pop_front() else { return };
            if sharing::has_others(row) {
                conversation.draining.push_back((row, release));
            } else {
                self.send_or_queue(Request::Release(release));
            }
        }
    }

    /// Retires the links of a lost broker that no connection uses. The last connection of each
    /// other link retires it.
    pub(super) fn retire_orphans(&mut self, effects: &mut Vec<Effect>) {
        if std::mem::take(&mut self.orphaned) {
            let idle = self.links.values().filter(|link| link.is_idle_for_good());
            effects.extend(idle.map(|link| Effect::Retire(link)));
        }
    }

    /// Keeps the structure of a peer that is no longer in use for another peer.
    pub(super) fn spare_if_unused(&mut self, peer: &'static Peer) {
        let is = |other: &'static Peer| std::ptr::eq(other, peer);
        if !self.peers.values().any(|other| is(other)) && !self.links.values().any(|link| is(link.peer)) {
            peer.forget_doorbells();
            self.spare_peers.push(peer);
        }
    }
}

pub(super) fn link_name(link: &Identity) -> LinkName {
    (link.epoch, link.id, link.side as u32)
}
