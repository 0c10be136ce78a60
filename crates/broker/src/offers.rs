//! What becomes of an offer: looked at, refused, left open, or paired. Nothing is paired that the kernel does not
//! vouch for at that moment (L3).

use std::os::fd::{AsFd, OwnedFd};

use shunt_abi::control::{Pair, Refused};
use shunt_abi::reason::Reason;
use shunt_kernel::sequence::{Origin, ReadError};
use shunt_sys::identity::{IdentifyError, Identity, identify};

use crate::diag::{Counts, Found};
use crate::links::Grant;
use crate::pairing::{Finding, Key, Offer, ProcessId};
use crate::state::State;

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
    pub(crate) fn offer(&mut self, id: ProcessId, ticket: u64, socket: OwnedFd) {
        let Some(process) = self.processes.get(&id) else { return };
        let uid = process.credentials.uid;
        let shown = identify(&socket);
        let origin = shown.as_ref().ok().and_then(|shown| self.origin(&socket, shown));
        // Before any answer, and whatever it is: while we hold it, the program's close does not end it.
        match shown {
            Ok(_) | Err(IdentifyError::NotEstablished(_)) => self.disposal.close_tcp(uid, socket),
            Err(_) => self.disposal.close(uid, socket),
        }
        let shown = match shown {
            Ok(shown) => shown,
            Err(error) => return self.refuse_lie(id, ticket, &error),
        };
        let refusal = if !self.namespaces.knows(shown.netns) {
            Some(Reason::ForeignNamespace)
        } else if shown.bound_device {
            Some(Reason::BoundToDevice)
        } else if shown.local == shown.remote {
            Some(Reason::SelfConnected)
        } else if self.offers.count(id) >= self.limits.offers {
            Some(Reason::BrokerLimit)
        } else if self.links.holder(shown.cookie).is_some_and(|holder| holder != id) {
            Some(Reason::Shared)
        } else {
            None
        };
        match refusal {
            Some(reason) => self.refuse(id, ticket, reason),
            None => self.place(offer_of(id, ticket, &shown, origin)),
        }
    }

    /// Where the streams of a socket begin, if there is anybody to ask.
    fn origin(&self, socket: &OwnedFd, shown: &Identity) -> Option<Origin> {
        match self.sequences.as_ref()?.origin(socket.as_fd(), shown.cookie) {
            Ok(origin) => Some(origin),
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

    /// Pairs an offer, leaves it open, or refuses it.
    fn place(&mut self, offer: Offer) {
        loop {
            match self.offers.look(&offer) {
                Finding::Nothing => return self.offers.insert(offer),
                Finding::Shared(other) => {
                    self.refuse(other.process, other.ticket, Reason::Shared);
                    return self.refuse(offer.process, offer.ticket, Reason::Shared);
                }
                // Two sockets cannot have these addresses at once. The kernel knows which one lives.
                Finding::Occupied(older) => match self.live(&offer) {
                    Ok(Some(_)) => self.refuse_open(&older, Reason::Stale),
                    Ok(None) => return self.refuse(offer.process, offer.ticket, Reason::Stale),
                    Err(reason) => return self.refuse(offer.process, offer.ticket, reason),
                },
                Finding::Counterpart(other) => match self.judge(&offer, &other) {
                    Ok(Verdict::Pair) => {
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
        let before = self.live(offer)?;
        let between = self.live(other)?;
        let (Some(before), Some(between)) = (before, between) else {
            return Ok(Verdict::Dead { offer: before.is_some(), other: between.is_some() });
        };
        if offer.key.mirrored() == other.key {
            return Ok(Verdict::Pair);
        }
        // Recognised by their origins: whatever is between them may have changed what they say.
        let Some(after) = self.live(offer)? else {
            return Ok(Verdict::Dead { offer: false, other: true });
        };
        let same = are_of_one_stream(before.counts, between.counts, after.counts);
        Ok(if same { Verdict::Pair } else { Verdict::Rewritten })
    }

    /// The socket that was offered, if it is still the one with its addresses.
    fn live(&mut self, offer: &Offer) -> Result<Option<Found>, Reason> {
        self.namespaces.find(offer.key, offer.cookie).map_err(|error| {
            tracing::warn!(%error, "sock_diag does not answer; is the kernel's tcp_diag module there?");
            Reason::ForeignNamespace
        })
    }

    /// Refuses those among open offers that are dead, and says whether there were any.
    fn refuse_dead(&mut self, offers: &[Offer]) -> bool {
        let dead: Vec<_> = offers.iter().filter(|offer| matches!(self.live(offer), Ok(None))).collect();
        dead.iter().for_each(|offer| self.refuse_open(offer, Reason::Stale));
        !dead.is_empty()
    }

    /// `earlier` and `later` are one connection.
    fn pair(&mut self, earlier: &Offer, later: &Offer) {
        let grant = match self.links.grant(earlier, later) {
            Ok(grant) => grant,
            Err(error) => {
                tracing::warn!(%error, "no link for a pair");
                self.refuse(earlier.process, earlier.ticket, Reason::BrokerLimit);
                return self.refuse(later.process, later.ticket, Reason::BrokerLimit);
            }
        };
        self.pairs_made += 1;
        // Towards each process: the link, then the doorbells, then the pair.
        let ends = [(earlier, later, grant.sides[0]), (later, earlier, grant.sides[1])];
        for (to, peer, side) in ends {
            self.say_link(to.process, peer.process, side, &grant);
        }
        if grant.introduction {
            self.say_doorbells(earlier.process, later.process);
            if earlier.process != later.process {
                self.say_doorbells(later.process, earlier.process);
            }
        }
        for (to, _, side) in ends {
            let Grant { link, conn, .. } = grant;
            let pair = Pair { ticket: to.ticket, cookie: to.cookie, link, conn, side: side as u32 };
            self.say(to.process, pair, None);
        }
    }

    fn refuse_open(&mut self, offer: &Offer, reason: Reason) {
        self.offers.remove(&offer.key);
        self.refuse(offer.process, offer.ticket, reason);
    }

    fn refuse_lie(&mut self, id: ProcessId, ticket: u64, error: &IdentifyError) {
        if let Some(process) = self.processes.get_mut(&id) {
            // A socket that is closing is what happens to honest programs.
            if !process.warned && !matches!(error, IdentifyError::NotEstablished(_)) {
                process.warned = true;
                let (pid, program) = (process.credentials.pid, &process.program);
                tracing::warn!(pid, program, %error, "offered something else than an established TCP socket");
            }
        }
        self.refuse(id, ticket, Reason::NotTcp);
    }

    fn refuse(&mut self, id: ProcessId, ticket: u64, reason: Reason) {
        *self.offers_refused.entry(reason).or_default() += 1;
        tracing::debug!(process = id, ticket, reason = reason.label(), "offer refused");
        self.say(id, Refused { ticket, reason: reason as u32, pad: 0 }, None);
    }
}

fn offer_of(process: ProcessId, ticket: u64, shown: &Identity, origin: Option<Origin>) -> Offer {
    let key = Key { netns: shown.netns, local: shown.local, remote: shown.remote };
    Offer { process, ticket, cookie: shown.cookie, key, origin }
}

/// Whether what one end has had acknowledged has been received by the other, and what the other has received has been
/// sent, in both directions. `one` is read before and after `two`, because they do not stand still. A SYN or a FIN
/// makes a difference of one. What rewrites a stream on its way, as helpers of address translation do, changes its
/// length.
fn are_of_one_stream(one_before: Counts, two: Counts, one_after: Counts) -> bool {
    one_before.acked <= two.received + 1
        && two.received <= one_after.sent + 1
        && one_before.received <= two.sent + 1
        && two.acked <= one_after.received + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_one_stream_fit_whatever_is_in_flight() {
        let counts = |acked, received, sent| Counts { acked, received, sent };
        // Quiet, the opener first; 100 bytes one way, 40 the other.
        assert!(are_of_one_stream(counts(101, 40, 100), counts(40, 100, 40), counts(101, 40, 100)));
        // In flight both ways, and moving between the readings.
        assert!(are_of_one_stream(counts(101, 40, 900), counts(40, 700, 5000), counts(800, 3000, 1200)));
        // Sent again, and a FIN.
        assert!(are_of_one_stream(counts(102, 0, 300), counts(0, 101, 0), counts(102, 0, 300)));
    }

    #[test]
    fn a_rewritten_stream_does_not_fit() {
        let counts = |acked, received, sent| Counts { acked, received, sent };
        let one = counts(21, 0, 20);
        assert!(!are_of_one_stream(one, counts(0, 25, 0), one), "longer on arrival");
        assert!(!are_of_one_stream(one, counts(0, 15, 0), one), "shorter on arrival");
        let one = counts(1, 25, 0);
        assert!(!are_of_one_stream(one, counts(20, 0, 20), one), "longer, the other way");
        let one = counts(1, 15, 0);
        assert!(!are_of_one_stream(one, counts(20, 0, 20), one), "shorter, the other way");
    }
}
