//! Decides about offers: each is checked, then refused, left open, or paired. Two sockets are
//! paired only if the kernel confirms at that moment that they are one connection (L3).
//!
//! All clients wait while an offer is processed here, so nothing may wait for a client. In
//! particular, no system call may take the lock of an offered socket: a program can hold it for as
//! long as it likes by sending pages whose page faults it serves itself. So the socket is not asked
//! for its addresses or its state. The process states the addresses, and the kernel's socket table
//! confirms them.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use shunt_abi::control::{DecodeError, Pair, Refused, Wanted};
use shunt_abi::reason::Reason;
use shunt_kernel::sequence::{Position, ReadError, Seen};
use shunt_sys::Errno;
use shunt_sys::identity::{IdentifyError, Shown, shown};
use shunt_sys::tcp::{ESTABLISHED, LISTEN};

use crate::blocking_pool::close_tcp;
use crate::links::{Grant, Held, Links};
use crate::pairing::{Finding, Key, Offer, ProcessId};
use crate::state::{BadMessage, State};
use crate::tracking::{self, Silence};

/// The kernel's verdict on two offers that may be one connection.
enum Verdict {
    /// They are the two ends of one connection.
    Pair,
    /// At least one is no longer the socket that was offered. The flags report which still are.
    Dead { offer: bool, other: bool },
    /// They are the ends of one connection whose bytes are changed on the way.
    Rewritten,
}

impl State {
    /// Processes an offer of a process.
    pub(crate) fn offer(
        &mut self,
        id: ProcessId,
        told: &shunt_abi::control::Offer,
        socket: OwnedFd,
    ) -> Result<(), BadMessage> {
        let Some(process) = self.processes.get(&id) else {
            self.close_all(id, Some(socket));
            return Ok(());
        };
        let whose = process.principal;
        let shown = shown(&socket);
        let seen = shown.as_ref().ok().and_then(|shown| self.look(&socket, shown));
        // Closed whatever the answer is: while the broker holds a copy, the program's close does
        // not end the connection.
        match shown {
            Ok(_) => close_tcp(&self.pool, whose, socket, process.outbox.acks.pending()),
            Err(_) => self.pool.close(whose, socket),
        }
        // The kernel's look-up of addresses of two different families is not defined.
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

    /// Checks whether an offered socket may be paired and has the stated addresses.
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
            // The socket is closing, closed, or gone and its addresses are used by another. That
            // happens to honest programs. A process that states the addresses of another socket
            // gets the same answer, and no pair.
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

    /// Returns the initial sequence numbers of a socket, if the kernel can report them.
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

    /// Pairs an offer that the kernel has just confirmed, leaves it open, or refuses it.
    pub(crate) fn place(&mut self, offer: Offer) {
        self.given_up.withdraw(offer.process, offer.ticket);
        loop {
            match self.offers.look(&offer) {
                Finding::Nothing => {
                    if let Some(other) = self.given_up.take_other_end(&offer) {
                        self.say(other.process, Wanted { ticket: other.ticket }, None);
                    }
                    self.offers.insert(offer);
                    return self.opened.notify_one();
                }
                Finding::Shared(other) => {
                    self.refuse(other.process, other.ticket, Reason::Shared);
                    return self.refuse(offer.process, offer.ticket, Reason::Shared);
                }
                // Two live sockets cannot have the same addresses.
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

    /// Checks at the moment of pairing that both are still the sockets that were offered, each in
    /// its own namespace (L3).
    fn judge(&mut self, offer: &Offer, other: &Offer) -> Result<Verdict, Reason> {
        // Compared before the check for liveness: a socket that is alive afterwards was alive
        // during the comparison.
        let are_one = match offer.key.mirrored() == other.key {
            true => offer.may_mirror(other),
            // They were matched by sequence numbers. A middlebox between them may have rewritten
            // their stream.
            false => self.are_of_one_stream(offer, other)?,
        };
        let lives = (self.is_live(offer)?, self.is_live(other)?);
        Ok(match lives {
            (true, true) if are_one => Verdict::Pair,
            (true, true) => Verdict::Rewritten,
            (offer, other) => Verdict::Dead { offer, other },
        })
    }

    /// Returns whether two live sockets are the two ends of one pair of byte streams.
    fn are_of_one_stream(&self, offer: &Offer, other: &Offer) -> Result<bool, Reason> {
        let (before, between, after) = (self.position(offer)?, self.position(other)?, self.position(offer)?);
        let all = before.zip(between).zip(after);
        Ok(all.is_some_and(|((before, between), after)| Position::are_of_one_stream(before, between, after)))
    }

    /// Returns the stream positions of an offered socket, or `None` if it has ended.
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

    /// Returns whether the offered socket still has its addresses and is held by a process.
    fn is_live(&mut self, offer: &Offer) -> Result<bool, Reason> {
        let found = self.namespaces.find(offer.key, offer.cookie).map_err(no_answer)?;
        Ok(found.is_some_and(|found| found.is_held))
    }

    /// Refuses the open offers among these whose sockets are dead. Returns whether there were any.
    fn refuse_dead(&mut self, offers: &[Offer]) -> bool {
        let dead: Vec<_> = offers.iter().filter(|offer| self.is_live(offer) == Ok(false)).collect();
        dead.iter().for_each(|offer| self.refuse_open(offer, Reason::Stale));
        !dead.is_empty()
    }

    /// Returns the process whose offered socket is paired or waits for a link.
    fn holder(&self, cookie: u64) -> Option<ProcessId> {
        self.links.holder(cookie).or_else(|| self.setups.holder(cookie))
    }

    /// Withdraws an offer. If its other end waits for a link, that end is processed as a new offer.
    pub(crate) fn withdraw(&mut self, id: ProcessId, ticket: u64) {
        self.given_up.withdraw(id, ticket);
        if self.offers.withdraw(id, ticket).is_none()
            && let Some(other) = self.setups.withdraw(id, ticket)
        {
            self.place(other);
        }
    }

    /// Withdraws an offer that has found no other end, and remembers it. An offer that is being
    /// paired is withdrawn only.
    pub(crate) fn give_up(&mut self, id: ProcessId, ticket: u64) {
        match (self.offers.withdraw(id, ticket), self.principal(id)) {
            (Some(offer), Some(whose)) => self.given_up.keep(offer, whose, self.limits.offers),
            _ => self.withdraw(id, ticket),
        }
    }

    /// Pairs two offers whose link has become ready. Either socket may have ended meanwhile.
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

    /// Pairs two offers, or has them wait for a link.
    fn pair(&mut self, earlier: &Offer, later: &Offer) {
        self.review_captures(Links::order(earlier.process, later.process));
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

    /// Returns how long the two ends of a pair may send nothing over TCP.
    fn silence(&mut self, one: Key, other: Key) -> Silence {
        if one.mirrored() == other {
            return tracking::silence(true, [self.namespaces.tracking(one.netns)]);
        }
        // Connection tracking between two namespaces is mostly done in the broker's.
        let on_the_way = [self.namespaces.own(), one.netns, other.netns];
        tracking::silence(false, on_the_way.map(|netns| self.namespaces.tracking(netns)))
    }

    pub(crate) fn refuse_open(&mut self, offer: &Offer, reason: Reason) {
        self.offers.remove(&offer.key);
        self.refuse(offer.process, offer.ticket, reason);
    }

    /// Logs an offer of something that no honest program would offer. Returns the reason for its
    /// refusal.
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
        self.say_refused(id, ticket, reason);
    }

    /// Ends a pair, which a policy forbids now. Both ends fall back to TCP.
    pub(crate) fn end_pair(&mut self, [one, other]: [&Held; 2], reason: Reason) {
        let owners = [one, other].map(|end| self.principal(end.process));
        let twice = owners[0] == owners[1];
        self.count(owners.into_iter().skip(usize::from(twice)).flatten(), |tally| {
            *tally.pairs_ended.entry(reason).or_default() += 1;
        });
        for end in [one, other] {
            self.say_refused(end.process, end.ticket, reason);
        }
    }

    fn say_refused(&self, id: ProcessId, ticket: u64, reason: Reason) {
        self.say(id, Refused { ticket, reason: reason as u32, pad: 0 }, None);
    }
}

fn no_answer(error: Errno) -> Reason {
    tracing::warn!(%error, "sock_diag does not answer; is the kernel's tcp_diag module there?");
    Reason::ForeignNamespace
}
