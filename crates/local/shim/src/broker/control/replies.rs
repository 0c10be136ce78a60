//! Messages of the broker, and what the process notes for each under the control lock.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::*;

use rustix::io::Errno;
use shunt_abi::control as message;
use shunt_abi::control::{
    DecodeError, MAX_MESSAGE, Mapped, Pair, PeerDoorbell, Release, Reply, Request, Unlink,
};
use shunt_abi::geometry::{CONNS, Geometry, Side, WAITERS};
use shunt_abi::reason::Reason;
use shunt_sys::mapping::Mapping;
use shunt_sys::{eventfd, memfd, seqpacket};

use super::links::link_name;
use super::{Control, Effect};
use crate::base::names::EndpointRef;
use crate::base::private::{PrivateFd, close_owned};
use crate::base::process;
use crate::socket::keepalive::Silence;
use crate::socket::links::{Attachment, Identity, Link, Peer};

/// The most messages that one operation of the program receives, so that a broker that never stops
/// sending cannot block it.
const BATCH: usize = 256;

/// What the broker has sent.
enum Message {
    /// A reply and the descriptor that came with it.
    Reply(Reply, Option<OwnedFd>),
    Undecodable(DecodeError),
    /// The broker has closed the conversation.
    End,
}

impl Control {
    pub(super) fn receive_all(&mut self, effects: &mut Vec<Effect>) {
        for _ in 0..BATCH {
            match self.receive() {
                None => return,
                Some(Ok(Message::Reply(reply, fd))) => self.handle(reply, fd, effects),
                Some(Ok(Message::Undecodable(error))) => {
                    let is_other = matches!(error, DecodeError::Version(_));
                    let reason = if is_other { Reason::BrokerVersion } else { Reason::NoBroker };
                    self.lose_broker(reason, effects);
                }
                Some(Err(Errno::AGAIN)) => {
                    self.send_queued();
                    return;
                }
                Some(Err(Errno::INTR)) => {}
                Some(Ok(Message::End) | Err(_)) => {
                    self.lose_broker(Reason::NoBroker, effects);
                }
            }
        }
    }

    /// Ends the conversation, and has the offers of endpoints taken back.
    fn lose_broker(&mut self, reason: Reason, effects: &mut Vec<Effect>) {
        self.lose(reason);
        effects.push(Effect::LostBroker);
    }

    /// Receives the next message. Returns `None` if there is no broker. Its buffers are large, so
    /// they are not on the stack while the message is obeyed.
    #[inline(never)]
    fn receive(&self) -> Option<rustix::io::Result<Message>> {
        let mut buffer = [0; MAX_MESSAGE];
        let received = seqpacket::recv(&self.session.conversation()?.socket, &mut buffer);
        Some(received.map(|(len, mut fds)| {
            if len == 0 {
                return Message::End;
            }
            process::SEEN.fetch_add(1, AcqRel);
            let first = fds.take_first();
            let count = fds.len() + usize::from(first.is_some());
            match Reply::decode(&buffer[..len], count) {
                Ok(reply) => Message::Reply(reply, first),
                Err(error) => {
                    first.into_iter().for_each(close_owned);
                    Message::Undecodable(error)
                }
            }
        }))
    }

    /// Does what a message of the broker says. Everything that needs other locks goes into `effects`.
    fn handle(&mut self, reply: Reply, fd: Option<OwnedFd>, effects: &mut Vec<Effect>) {
        match (reply, fd) {
            (Reply::Welcome(_), Some(board)) => self.handle_welcome(board, effects),
            (Reply::Link(body), Some(memory)) => self.map_link(body, memory),
            (Reply::PeerDoorbell(body), Some(doorbell)) => self.take_doorbell(body, doorbell, effects),
            (Reply::Pair(body), None) => self.pair(body, effects),
            (Reply::Refused(body), None) => {
                let reason = Reason::parse(body.reason as u16).unwrap_or(Reason::NotTcp);
                effects.push(Effect::Refuse(EndpointRef::unpack(body.ticket), reason));
            }
            (Reply::Wanted(body), None) => {
                let name = EndpointRef::unpack(body.ticket);
                // All threads are listed once for many messages.
                match effects.last_mut() {
                    Some(Effect::Reopen(names)) => names.push(name),
                    _ => effects.push(Effect::Reopen(vec![name])),
                }
            }
            (Reply::NotKept(body), None) => effects.push(Effect::KeepBytes(EndpointRef::unpack(body.ticket))),
            (Reply::PeerGone(body), None) => self.forget_peer(body.peer, effects),
            (Reply::Unlink(body), None) => self.unlink(body, effects),
            (Reply::Vacate(body), None) => {
                let link = self.links.get(&(self.session.epoch(), body.link, body.side)).copied();
                effects.extend(link.filter(|link| link.is_open()).map(Effect::Vacate));
            }
            (_, fd) => {
                if let Some(fd) = fd {
                    close_owned(fd);
                }
            }
        }
    }

    /// Maps the board, after which the broker may be asked.
    fn handle_welcome(&mut self, board: OwnedFd, effects: &mut Vec<Effect>) {
        let is_kept = process::set_board(&board);
        close_owned(board);
        if !is_kept {
            return self.lose_broker(Reason::NoMemory, effects);
        }
        self.session.welcome(process::now());
        process::note_registered();
    }

    /// Maps the memory of a new link, and reports whether that succeeded.
    fn map_link(&mut self, body: message::Link, memory: OwnedFd) {
        let geometry = Geometry::new(body.ring_bytes as usize);
        let mut is_mapped = 0;
        if let (Some(geometry), Some(side)) = (geometry, Side::parse(body.side))
            && memfd::verify_fixed(&memory, geometry.link_bytes()).is_ok()
            && let Ok(mapping) = Mapping::map(&memory, geometry.link_bytes())
                .or_else(|_| Mapping::map(&memory, geometry.spills_offset()))
        {
            let peer = self.peer(body.peer);
            let identity = Identity::new(body.link, side, peer, self.session.epoch(), &mapping, geometry);
            let link = self.new_link(identity, mapping);
            self.links.insert(link_name(link), link);
            is_mapped = 1;
        }
        close_owned(memory);
        // The broker seals the memory once both ends have mapped it. No process touches the memory
        // before the first pair (L5).
        let (link, side) = (body.link, body.side);
        self.send_or_queue(Request::Mapped(Mapped { link, side, is_mapped }));
    }

    /// Keeps a peer's doorbell, unless this process has no descriptor for it.
    fn take_doorbell(&mut self, body: PeerDoorbell, doorbell: OwnedFd, effects: &mut Vec<Effect>) {
        let peer = self.peer(body.peer);
        if peer.is_mute() {
            return close_owned(doorbell);
        }
        let adopted = PrivateFd::adopt_one_of_many(doorbell, peer.known_slots().count());
        match (body.slot as usize, adopted) {
            // The doorbell is tested before the peer sees that this process has it.
            (slot, Some(doorbell)) if slot < WAITERS && eventfd::ring(&doorbell).is_ok() => {
                peer.set_doorbell(slot, doorbell);
                let of_it = |link: &&&'static Link| link.is_open() && std::ptr::eq(link.peer, peer);
                for link in self.links.values().filter(of_it) {
                    link.view().set_known(link.side, slot);
                }
            }
            (_, None) => {
                peer.set_mute();
                effects.push(Effect::Mute(peer));
            }
            _ => {}
        }
    }

    /// Opens the link of a pair, and has its connection attached.
    fn pair(&mut self, body: Pair, effects: &mut Vec<Effect>) {
        let name = EndpointRef::unpack(body.ticket);
        let conn = body.conn as usize;
        if let Some(link) = self.link(&body) {
            link.open();
        }
        match self.link(&body).filter(|_| conn < CONNS) {
            Some(link) if !link.peer.is_mute() => {
                let silence = Silence::new(body.silence, body.silence_half_closed);
                effects.push(Effect::Adopt(name, Attachment::new(link, conn).pin(), silence));
            }
            link => {
                // The other end must not wait for a connection that will not come about.
                if let Some(link) = link {
                    link.close_lanes(conn);
                }
                let Pair { link: id, conn, side, .. } = body;
                self.send_or_queue(Request::Release(Release { link: id, conn, side }));
                let reason = if link.is_some() { Reason::DescriptorLimit } else { Reason::NoMemory };
                effects.push(Effect::Refuse(name, reason));
            }
        }
    }

    /// Forgets a peer that has ended. Its links remain until their connections have left them.
    fn forget_peer(&mut self, peer: u64, effects: &mut Vec<Effect>) {
        let Some(peer) = self.peers.remove(&peer) else { return };
        peer.forget_doorbells();
        for link in self.links.values().filter(|link| std::ptr::eq(link.peer, peer)) {
            link.set_gone();
            // If the link is not sealed yet, the broker reports later when it can be unmapped.
            if link.is_open() {
                effects.push(Effect::Retire(link));
            }
        }
        self.spare_if_unused(peer);
    }

    /// Retires one link.
    fn unlink(&mut self, body: Unlink, effects: &mut Vec<Effect>) {
        let Some(link) = self.links.get(&(self.session.epoch(), body.link, body.side)).copied() else {
            return;
        };
        link.set_gone();
        if body.may_unmap != 0 {
            link.note_sealed();
        }
        // A peer without links is removed, as when it ends. The broker introduces it again when it
        // makes another link.
        let remains = |other: &&'static Link| !other.is_gone() && std::ptr::eq(other.peer, link.peer);
        if !self.links.values().any(remains) {
            self.peers.retain(|_, peer| !std::ptr::eq(*peer, link.peer));
        }
        effects.push(Effect::Retire(link));
    }

    pub(super) fn peer(&mut self, id: u64) -> &'static Peer {
        let spare = &mut self.spare_peers;
        self.peers.entry(id).or_insert_with(|| match spare.pop() {
            Some(peer) => {
                peer.reuse();
                peer
            }
            None => Peer::make(),
        })
    }

    fn new_link(&mut self, identity: Identity, mapping: Mapping) -> &'static Link {
        match self.spare_links.pop() {
            Some(link) => {
                // SAFETY: the link was retired before it became a spare, and the control lock is
                // held.
                unsafe { link.reuse(identity, mapping) };
                link
            }
            None => Box::leak(Box::new(Link::new(identity, mapping))),
        }
    }

    pub(super) fn link(&self, body: &Pair) -> Option<&'static Link> {
        self.links.get(&(self.session.epoch(), body.link, body.side)).copied()
    }
}
