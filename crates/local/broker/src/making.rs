//! Makes links: sends the decisions of [`crate::setup`] to the two ends, and runs the blocking
//! parts on the blocking pool.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use shunt_abi::control::Link;
use shunt_abi::geometry::Side;
use shunt_abi::reason::Reason;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep_until;

use crate::blocking_pool::Pool;
use crate::links::{Full, LinkId, Links};
use crate::pairing::{Offer, ProcessId};
use crate::principal::Whose;
use crate::setup::{Answered, Failure, Making, Memory, Order, Wait};
use crate::state::State;

/// Maximum number of tasks per pair of principals on the blocking pool. Memory that waits there to
/// be unmapped is no longer counted in the budget of links.
const PENDING: usize = 1024;

/// Seals the memory of links without ever blocking the caller.
#[derive(Clone, Debug)]
pub(crate) struct Sealer {
    done: UnboundedSender<(LinkId, bool)>,
    /// Notified when a link has been begun, which may bring a new deadline.
    begun: Rc<Notify>,
}

/// Returns a sealer, and a channel that receives the id of each finished link and whether it is
/// sealed.
pub(crate) fn sealer() -> (Sealer, UnboundedReceiver<(LinkId, bool)>) {
    let (done, sealed) = unbounded_channel();
    (Sealer { done, begun: Rc::default() }, sealed)
}

/// Reports on drop whether a link is sealed, so that it is reported whatever becomes of the call.
#[derive(Debug)]
struct Outcome {
    done: UnboundedSender<(LinkId, bool)>,
    link: LinkId,
    is_sealed: bool,
}

impl Drop for Outcome {
    fn drop(&mut self) {
        // Fails only after the broker has ended.
        let _ = self.done.send((self.link, self.is_sealed));
    }
}

impl Sealer {
    fn seal(&self, pool: &Pool, link: LinkId, whose: Whose, memory: Arc<Memory>) {
        let mut outcome = Outcome { done: self.done.clone(), link, is_sealed: false };
        pool.run(whose, move || {
            outcome.is_sealed = memory.seal();
            drop(memory);
            drop(outcome);
        });
    }
}

/// Finishes links after sealing, and gives up those that were not answered in time. Runs as long as
/// the broker.
pub(crate) async fn finish_links(state: Rc<RefCell<State>>, mut sealed: UnboundedReceiver<(LinkId, bool)>) {
    let begun = state.borrow().sealer.begun.clone();
    loop {
        let deadline = state.borrow().setups.deadline();
        let until = tokio::time::Instant::from_std(deadline.unwrap_or_else(Instant::now));
        tokio::select! {
            done = sealed.recv() => {
                let Some((link, is_sealed)) = done else { return };
                state.borrow_mut().link_sealed(link, is_sealed);
            }
            () = begun.notified() => {}
            () = sleep_until(until), if deadline.is_some() => {
                state.borrow_mut().give_links_up(Instant::now());
            }
        }
    }
}

impl State {
    /// Has a pair of offers wait for a link, because no existing link has a free slot.
    pub(crate) fn wait_for_link(&mut self, offers: [Offer; 2]) {
        if let Err(reason) = self.try_wait_for_link(offers) {
            if reason == Reason::BrokerLimit
                && let Some(times) = self.log_limits.note("no link", Instant::now())
            {
                tracing::warn!(times, "no link for a pair: too many are in use, or there is no memory");
            }
            let [earlier, later] = &offers;
            self.refuse_both([earlier, later], reason);
        }
    }

    fn try_wait_for_link(&mut self, offers: [Offer; 2]) -> Result<(), Reason> {
        let ends = Links::order(offers[0].process, offers[1].process);
        let whose = self.links.whose(ends).map_err(|Full| Reason::BrokerLimit)?;
        match self.setups.wait(ends, whose, offers) {
            Wait::Waits => return Ok(()),
            Wait::Full => return Err(Reason::BrokerLimit),
            Wait::NoLink => self.begin_link(ends, whose, &offers)?,
        }
        match self.setups.wait(ends, whose, offers) {
            Wait::Waits => Ok(()),
            // The link is made nevertheless, and dropped if it stays unused.
            Wait::Full | Wait::NoLink => Err(Reason::BrokerLimit),
        }
    }

    fn begin_link(&mut self, ends: [ProcessId; 2], whose: Whose, offers: &[Offer; 2]) -> Result<(), Reason> {
        if self.pool.pending(whose) >= PENDING {
            return Err(Reason::BrokerLimit);
        }
        let [Some(one), Some(other)] = ends.map(|end| self.principal(end)) else {
            return Err(Reason::BrokerLimit);
        };
        if !self.setups.may_share([one.account(), other.account()]) {
            return Err(Reason::LinkNotMade);
        }
        let id = self.links.reserve(whose).map_err(|Full| Reason::BrokerLimit)?;
        let memory = match Memory::make(self.links.geometry()) {
            Ok(memory) => Arc::new(memory),
            Err(error) => {
                tracing::debug!(%error, "no memory or descriptor for another link");
                self.links.cancel(whose);
                return Err(Reason::BrokerLimit);
            }
        };
        let order = Order::of([one, other], opener(ends, offers));
        self.setups.begin(id, ends, whose, memory.clone(), order, Instant::now());
        for side in [Side::A, Side::B].into_iter().filter(|side| order.asks(*side)) {
            self.say_link(id, side, ends, &memory);
        }
        self.sealer.begun.notify_one();
        Ok(())
    }

    fn say_link(&self, id: LinkId, side: Side, ends: [ProcessId; 2], memory: &Arc<Memory>) {
        let (to, peer) = (ends[side as usize], ends[side.other() as usize]);
        let ring_bytes = self.links.ring_bytes() as u64;
        let link = Link { link: id, peer, ring_bytes, side: side as u32, pad: 0 };
        self.say(to, link, Some(Rc::new(memory.clone())));
    }

    /// Processes the answer of a process that has mapped its side of a link, or failed to.
    pub(crate) fn mapped(&mut self, id: ProcessId, link: LinkId, side: Side, is_mapped: bool) {
        match self.setups.answered(id, link, side, is_mapped, Instant::now()) {
            Some(Answered::Ask(side, ends, memory)) => self.say_link(link, side, ends, &memory),
            Some(Answered::Seal(whose, memory)) => self.sealer.seal(&self.pool, link, whose, memory),
            None => {}
        }
    }

    /// Gives up links that were not answered in time. They are sealed first, so that the ends can
    /// unmap them.
    fn give_links_up(&mut self, now: Instant) {
        for (link, whose, memory) in self.setups.expired(now) {
            self.sealer.seal(&self.pool, link, whose, memory);
        }
    }

    /// Processes a link that the blocking pool is done with.
    fn link_sealed(&mut self, id: LinkId, is_sealed: bool) {
        let Some((making, failure)) = self.setups.sealed(id, is_sealed) else { return };
        match failure {
            None => self.open_link(id, making),
            Some(failure) => self.refuse_link(id, making, failure),
        }
    }

    fn open_link(&mut self, id: LinkId, making: Making) {
        let Making { ends, whose, memory, waiting, .. } = making;
        let is_only = self.links.add(id, ends, whose, memory, Instant::now());
        self.tell_new_link(id);
        // Each process receives the link first, then the doorbells, then the pairs.
        if is_only {
            self.say_doorbells(ends[0], ends[1]);
            if ends[0] != ends[1] {
                self.say_doorbells(ends[1], ends[0]);
            }
        }
        waiting.into_iter().for_each(|offers| self.pair_again(offers));
        self.note_released();
    }

    fn refuse_link(&mut self, id: LinkId, making: Making, failure: Failure) {
        let Making { ends, whose, memory, waiting, .. } = making;
        tracing::debug!(link = id, ?failure, "a link has not come about");
        self.links.cancel(whose);
        let may_unmap = memory.may_unmap() || self.note_unsealed(whose, memory);
        for offer in waiting.iter().flatten() {
            let side = if ends[0] == offer.process { Side::A } else { Side::B };
            self.refuse(offer.process, offer.ticket, failure.reason(side));
        }
        self.unlink(id, ends, may_unmap);
    }

    /// Records that sealing was prevented. Returns whether the memory may be unmapped nevertheless,
    /// because all processes that have it are trusted.
    fn note_unsealed(&mut self, whose: Whose, memory: Arc<Memory>) -> bool {
        let accounts = whose.each().map(|one| one.account());
        if accounts == [None, None] {
            memory.trust();
            self.pool.run(whose, move || drop(memory));
            return true;
        }
        if let Some(times) = self.log_limits.note("unsealed", Instant::now()) {
            tracing::warn!(
                times,
                ?whose,
                "a program has kept shared memory from being sealed: these users share none any more"
            );
        }
        self.setups.keep_apart(accounts);
        false
    }

    /// Gives up the links of a process that has ended. Returns the waiting offers of the other
    /// ends.
    pub(crate) fn abandon_links_of(&mut self, id: ProcessId) -> Vec<Offer> {
        let left = self.setups.forget(id);
        for (link, whose, memory) in left.unsealed {
            self.sealer.seal(&self.pool, link, whose, memory);
        }
        left.offers
    }
}

/// Returns the side of the process that called `connect`, if the kernel could report it.
fn opener(ends: [ProcessId; 2], [one, other]: &[Offer; 2]) -> Option<Side> {
    let (seen, seen_of_other) = (one.seen?, other.seen?);
    let opener = if seen.origin.has_opened(seen_of_other.origin)? { one } else { other };
    Some(if ends[0] == opener.process { Side::A } else { Side::B })
}
