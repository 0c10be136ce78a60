//! What becomes of an offer: looked at, refused, left open, or paired. Nothing is paired that the kernel does not
//! vouch for at that moment (L3).
//!
//! Every client waits while one is answered here, so nothing may wait for a client: no call is made that takes the lock of a socket,
//! which a program holds as long as it likes by sending pages that it serves itself. So a socket is not asked for its addresses or its
//! state: who shows it says which addresses it has, and the kernel's table of sockets whether that is so.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use shunt_abi::control::{DecodeError, Pair, Refused};
use shunt_abi::reason::Reason;
use shunt_kernel::sequence::{Position, ReadError, Seen};
use shunt_sys::Errno;
use shunt_sys::identity::{IdentifyError, Shown, shown};
use shunt_sys::tcp::{ESTABLISHED, LISTEN};

use crate::links::Grant;
use crate::pairing::{Finding, Key, Offer, ProcessId};
use crate::state::{BadMessage, State};
use crate::tracking::{self, Silence};

/// What the kernel says of two offers that look like one connection.
enum Verdict {
    /// They are.
    Pair,
    /// Not both are the sockets that were shown any more: which still is.
    Dead { offer: bool, other: bool },
    /// They are the ends of one connection, but not of the same streams.
    Rewritten,
}

impl State {
    /// Takes a socket that a process offers.
    pub(crate) fn offer(
        &mut self,
        id: ProcessId,
        told: &shunt_abi::control::Offer,
        socket: OwnedFd,
    ) -> Result<(), BadMessage> {
        let Some(process) = self.processes.get(&id) else { return Ok(()) };
        let whose = process.principal;
        let shown = shown(&socket);
        let seen = shown.as_ref().ok().and_then(|shown| self.look(&socket, shown));
        // Whatever the answer is: while we hold it, the program's close does not end it.
        match shown {
            Ok(_) => self.disposal.close_tcp(whose, socket, process.outbox.taken.receipt()),
            Err(_) => self.disposal.close(whose, socket),
        }
        // The kernel would understand two families as it likes.
        let (local, remote) = told.addresses().ok_or(DecodeError::Field("remote"))?;
        let verdict = shown.map_err(|error| self.refuse_lie(id, &error)).and_then(|shown| {
            self.vet(id, &shown, local, remote)?;
            let key = Key { netns: shown.netns, local, remote };
            Ok(Offer {
                process: id,
                ticket: told.ticket,
                cookie: shown.cookie,
                key,
                seen,
                since: Instant::now(),
            })
        });
        match verdict {
            Ok(offer) => self.place(offer),
            Err(reason) => self.refuse(id, told.ticket, reason),
        }
        Ok(())
    }

    /// Whether a socket that was shown may be paired, and is the one that has these addresses.
    fn vet(
        &mut self,
        id: ProcessId,
        shown: &Shown,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(), Reason> {
        if !self.namespaces.knows(shown.netns) {
            return Err(Reason::ForeignNamespace);
        }
        if shown.bound_device {
            return Err(Reason::BoundToDevice);
        }
        let key = Key { netns: shown.netns, local, remote };
        match self.namespaces.find(key, shown.cookie).map_err(no_answer)?.map(|found| found.state) {
            Some(ESTABLISHED) => {}
            Some(LISTEN) => return Err(self.refuse_lie(id, &IdentifyError::NotEstablished(LISTEN))),
            // Closing, closed, or gone and its addresses with somebody else, which is what happens to honest programs. Who names
            // others' addresses gets no other answer, and no pair.
            _ => return Err(Reason::Stale),
        }
        if local == remote {
            Err(Reason::SelfConnected)
        } else if !self.offers.has_room(id, self.limits.offers) {
            Err(Reason::BrokerLimit)
        } else if self.holder(shown.cookie).is_some_and(|holder| holder != id) {
            Err(Reason::Shared)
        } else {
            Ok(())
        }
    }

    /// Where the streams of a socket begin, if there is anybody to ask.
    fn look(&self, socket: &OwnedFd, shown: &Shown) -> Option<Seen> {
        match self.sequences.as_ref()?.look(socket.as_fd(), shown.cookie) {
            Ok(seen) => Some(seen),
            Err(error @ ReadError::Kernel(_)) => {
                tracing::warn!(%error, "no sequence numbers: not paired across namespaces");
                None
            }
            Err(error) => {
                tracing::debug!(%error, "no sequence numbers");
                None
            }
        }
    }

    /// Pairs an offer, which the kernel has just vouched for, leaves it open, or refuses it.
    pub(crate) fn place(&mut self, offer: Offer) {
        loop {
            match self.offers.look(&offer) {
                Finding::Nothing => {
                    self.offers.insert(offer);
                    return self.opened.notify_one();
                }
                Finding::Shared(other) => {
                    self.refuse(other.process, other.ticket, Reason::Shared);
                    return self.refuse(offer.process, offer.ticket, Reason::Shared);
                }
                // Two sockets cannot have these addresses at once.
                Finding::Occupied(older) => self.refuse_open(&older, Reason::Stale),
                Finding::Counterpart(other) | Finding::Unlike(other) => match self.judge(&offer, &other) {
                    Ok(Verdict::Pair) => {
                        if let Some(reason) = self.forbids(&offer, &other) {
                            self.refuse_open(&other, reason);
                            return self.refuse(offer.process, offer.ticket, reason);
                        }
                        self.offers.remove(&other.key);
                        return self.pair(&other, &offer);
                    }
                    Ok(Verdict::Rewritten) => {
                        self.refuse_open(&other, Reason::Rewritten);
                        return self.refuse(offer.process, offer.ticket, Reason::Rewritten);
                    }
                    Ok(Verdict::Dead { offer: lives, other: other_lives }) => {
                        if !other_lives {
                            self.refuse_open(&other, Reason::Stale);
                        }
                        if !lives {
                            return self.refuse(offer.process, offer.ticket, Reason::Stale);
                        }
                    }
                    Err(reason) => return self.refuse(offer.process, offer.ticket, reason),
                },
                Finding::Ambiguous(others) => {
                    if !self.refuse_dead(&others) {
                        others.iter().for_each(|other| self.refuse_open(other, Reason::Ambiguous));
                        return self.refuse(offer.process, offer.ticket, Reason::Ambiguous);
                    }
                }
            }
        }
    }

    /// L3: at the moment of pairing both must still be the sockets that were shown, each in its own namespace.
    fn judge(&mut self, offer: &Offer, other: &Offer) -> Result<Verdict, Reason> {
        // Before it is asked who lives: who lives then did so all the time, and is what was read.
        let are_one = match offer.key.mirrored() == other.key {
            true => offer.may_mirror(other),
            // Recognised by their origins: whatever is between them may have changed what they say.
            false => self.are_of_one_stream(offer, other)?,
        };
        let lives = (self.is_live(offer)?, self.is_live(other)?);
        Ok(match lives {
            (true, true) if are_one => Verdict::Pair,
            (true, true) => Verdict::Rewritten,
            (offer, other) => Verdict::Dead { offer, other },
        })
    }

    /// Whether two that live have the same streams between them.
    fn are_of_one_stream(&self, offer: &Offer, other: &Offer) -> Result<bool, Reason> {
        let (before, between, after) = (self.position(offer)?, self.position(other)?, self.position(offer)?);
        let all = before.zip(between).zip(after);
        Ok(all.is_some_and(|((before, between), after)| fit(before, between, after)))
    }

    /// How far the socket of an offer is. Nothing: it has ended.
    fn position(&self, offer: &Offer) -> Result<Option<Position>, Reason> {
        let Some((reader, seen)) = self.sequences.as_ref().zip(offer.seen) else { return Ok(None) };
        match reader.position(seen.place, offer.cookie) {
            Ok(position) => Ok(Some(position)),
            Err(ReadError::Kernel(error)) => {
                tracing::warn!(%error, "no sequence numbers: not paired across namespaces");
                Err(Reason::ForeignNamespace)
            }
            Err(_) => Ok(None),
        }
    }

    /// Whether the socket that was offered still is the one with its addresses, and a process has it.
    fn is_live(&mut self, offer: &Offer) -> Result<bool, Reason> {
        let found = self.namespaces.find(offer.key, offer.cookie).map_err(no_answer)?;
        Ok(found.is_some_and(|found| found.is_held))
    }

    /// Refuses those among open offers that are dead, and says whether there were any.
    fn refuse_dead(&mut self, offers: &[Offer]) -> bool {
        let dead: Vec<_> = offers.iter().filter(|offer| self.is_live(offer) == Ok(false)).collect();
        dead.iter().for_each(|offer| self.refuse_open(offer, Reason::Stale));
        !dead.is_empty()
    }

    /// The process that has offered a socket which is paired, or waits for a link.
    fn holder(&self, cookie: u64) -> Option<ProcessId> {
        self.links.holder(cookie).or_else(|| self.setups.holder(cookie))
    }

    /// A process takes an offer back. If its other end waits for a link, that may meet another.
    pub(crate) fn withdraw(&mut self, id: ProcessId, ticket: u64) {
        if self.offers.withdraw(id, ticket).is_none()
            && let Some(other) = self.setups.withdraw(id, ticket)
        {
            self.place(other);
        }
    }

    /// There is a link for a pair that has waited for it. Meanwhile either end may have gone.
    pub(crate) fn pair_again(&mut self, [earlier, later]: [Offer; 2]) {
        let lives = match self.judge(&later, &earlier) {
            Ok(Verdict::Pair) => match self.forbids(&later, &earlier) {
                None => return self.pair(&earlier, &later),
                Some(reason) => return self.refuse_both([&earlier, &later], reason),
            },
            Ok(Verdict::Dead { offer, other }) => [other, offer],
            Ok(Verdict::Rewritten) => {
                return self.refuse_both([&earlier, &later], Reason::Rewritten);
            }
            Err(reason) => return self.refuse_both([&earlier, &later], reason),
        };
        for (offer, lives) in [earlier, later].into_iter().zip(lives) {
            match lives {
                true => self.place(offer),
                false => self.refuse(offer.process, offer.ticket, Reason::Stale),
            }
        }
    }

    pub(crate) fn refuse_both(&mut self, offers: [&Offer; 2], reason: Reason) {
        offers.into_iter().for_each(|offer| self.refuse(offer.process, offer.ticket, reason));
    }

    /// `earlier` and `later` are one connection.
    fn pair(&mut self, earlier: &Offer, later: &Offer) {
        let Some(grant) = self.links.grant(earlier, later) else {
            return self.wait_for_link([*earlier, *later]);
        };
        self.tell_grant(&grant);
        let owners = [earlier, later].map(|offer| self.principal(offer.process));
        let twice = owners[0] == owners[1];
        self.pairing.observe(earlier.since.elapsed().as_secs_f64());
        self.count(owners.into_iter().skip(usize::from(twice)).flatten(), |tally| tally.pairs_made += 1);
        let silence = self.silence(earlier.key, later.key);
        for (to, side) in [(earlier, grant.sides[0]), (later, grant.sides[1])] {
            let Grant { link, conn, .. } = grant;
            let Silence { open: silence, half_closed: silence_half_closed } = silence;
            let (ticket, cookie, side) = (to.ticket, to.cookie, side as u32);
            let pair = Pair { ticket, cookie, link, conn, side, silence, silence_half_closed };
            self.say(to.process, pair, None);
        }
    }

    /// Returns how long the two ends of a pair may send nothing by TCP.
    fn silence(&mut self, one: Key, other: Key) -> Silence {
        if one.mirrored() == other {
            return tracking::silence(true, [self.namespaces.tracking(one.netns)]);
        }
        // What lies between two namespaces is mostly in the broker's.
        let on_the_way = [self.namespaces.own(), one.netns, other.netns];
        tracking::silence(false, on_the_way.map(|netns| self.namespaces.tracking(netns)))
    }

    pub(crate) fn refuse_open(&mut self, offer: &Offer, reason: Reason) {
        self.offers.remove(&offer.key);
        self.refuse(offer.process, offer.ticket, reason);
    }

    /// Somebody has shown what no honest program would. Tells why it is refused.
    fn refuse_lie(&mut self, id: ProcessId, error: &IdentifyError) -> Reason {
        if let Some(process) = self.processes.get_mut(&id)
            && !process.warned
        {
            process.warned = true;
            let (pid, program) = (process.credentials.pid, &process.program);
            tracing::warn!(pid, program, %error, "offered something else than an established TCP socket");
        }
        Reason::NotTcp
    }

    pub(crate) fn refuse(&mut self, id: ProcessId, ticket: u64, reason: Reason) {
        self.count(self.principal(id), |tally| *tally.offers_refused.entry(reason).or_default() += 1);
        tracing::debug!(process = id, ticket, reason = reason.label(), "offer refused");
        self.say(id, Refused { ticket, reason: reason as u32, pad: 0 }, None);
    }
}

fn no_answer(error: Errno) -> Reason {
    tracing::warn!(%error, "sock_diag does not answer; is the kernel's tcp_diag module there?");
    Reason::ForeignNamespace
}

/// Whether what one end knows to have arrived has been received by the other, and what the other has received has been sent, in both
/// directions. `one` is read before and after `two`, because they do not stand still. What rewrites a stream on its way, as helpers of
/// address translation do, changes its length, and so the numbers from there on.
fn fit(one_before: Position, two: Position, one_after: Position) -> bool {
    let is_behind = |one: u32, other: u32| other.wrapping_sub(one) as i32 >= 0;
    is_behind(one_before.acknowledged, two.received)
        && is_behind(two.received, one_after.sent)
        && is_behind(one_before.received, two.sent)
        && is_behind(two.acknowledged, one_after.received)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far enough on for the numbers to begin anew between them.
    fn position(acknowledged: u32, received: u32, sent: u32) -> Position {
        let [acknowledged, received, sent] =
            [acknowledged, received, sent].map(|count| count.wrapping_add(u32::MAX - 500));
        Position { acknowledged, received, sent }
    }

    #[test]
    fn ends_of_one_stream_fit_whatever_is_in_flight() {
        // Quiet; 100 bytes one way, 40 the other.
        assert!(fit(position(100, 40, 100), position(40, 100, 40), position(100, 40, 100)));
        // In flight both ways, and moving between the readings.
        assert!(fit(position(100, 40, 900), position(40, 700, 5000), position(800, 3000, 1200)));
    }

    #[test]
    fn a_rewritten_stream_does_not_fit() {
        let one = position(20, 0, 20);
        assert!(!fit(one, position(0, 21, 0), one), "longer on arrival");
        assert!(!fit(one, position(0, 19, 0), one), "shorter on arrival");
        let one = position(0, 21, 0);
        assert!(!fit(one, position(20, 0, 20), one), "longer, the other way");
        let one = position(0, 19, 0);
        assert!(!fit(one, position(20, 0, 20), one), "shorter, the other way");
    }
}
