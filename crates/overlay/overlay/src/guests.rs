//! The lines that other routers keep to this one: their Asks, and the answers to them. `peers` has
//! the lines in the other direction.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shunt_key::Keys;
use shunt_tls::Via;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::lock::lock;
use crate::policy::Flow;
use crate::promises::Expected;
use crate::reason::Reason;
use crate::registry::Takers;
use crate::shared::Shared;
use crate::wire::{Ask, Line, Message, Receiver, Ticket, Token, WireError};

/// All incoming lines.
#[derive(Debug, Default)]
pub(crate) struct Guests(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    guests: HashMap<u64, Arc<Guest>>,
    /// The Asks that were answered with yes and not yet offered.
    pending: Pending<Coming>,
}

/// Values by the token of their Ask, for as long as the line of the Ask is open.
#[derive(Debug)]
struct Pending<T> {
    last_line: u64,
    /// The open lines, each with the tokens of its Asks, by number.
    lines: HashMap<u64, HashMap<u32, Token>>,
    by_token: HashMap<Token, (u64, u32, T)>,
}

#[derive(Debug)]
struct Guest {
    host: IpAddr,
    line: Line,
    receiver: Mutex<Receiver>,
    forgotten: Mutex<Forgotten>,
    changed: Notify,
}

/// How far the other router has got with forgetting.
#[derive(Debug, Default)]
struct Forgotten {
    /// The number of the last Forget that was sent.
    sent: u32,
    /// The number of the last Forget that was confirmed.
    confirmed: u32,
    /// The line has ended, so the router remembers nothing.
    is_over: bool,
}

/// A connection that another router has asked for, and may offer.
#[derive(Debug)]
pub(crate) struct Coming {
    pub(crate) host: IpAddr,
    pub(crate) ask: Ask,
    pub(crate) ticket: Ticket,
    /// Its overlay connection had been begun before it was sent.
    pub(crate) follows: bool,
    /// The version of its line.
    pub(crate) version: u8,
    pub(crate) takers: Takers,
    /// Held until the connection is offered, or will not be.
    pub(crate) expected: Expected,
    since: Instant,
}

/// The largest number of Asks that may be pending.
const COMING: usize = 16_384;
/// The time after which no offer can follow an Ask. The kernel gives up an unanswered SYN after a
/// little more than two minutes.
pub(crate) const CONNECTING: Duration = Duration::from_secs(180);

impl Guests {
    /// Returns the ticket with that token, if its Ask is pending, on a line of that version.
    pub(crate) fn ticket(&self, token: &Token, version: u8) -> Option<Ticket> {
        let state = self.state();
        state.pending.get(token).filter(|coming| coming.version == version).map(|coming| coming.ticket)
    }

    /// Takes the Ask of an offered connection. Each token is taken once.
    pub(crate) fn take(&self, token: &Token) -> Option<Coming> {
        self.state().pending.take(token)
    }

    /// Reads all messages that have arrived from that host's router, or from every one, without
    /// waiting for the reactor to report them.
    pub(crate) fn listen(&self, shared: &Arc<Shared>, host: Option<IpAddr>) {
        let guests: Vec<_> = {
            let state = self.state();
            let meant = state.guests.iter().filter(|(_, guest)| host.is_none_or(|host| guest.host == host));
            meant.map(|(id, guest)| (*id, guest.clone())).collect()
        };
        for (id, guest) in guests {
            if guest.listen(shared, id, Via::Kernel).is_err() {
                guest.line.close();
            }
        }
    }

    /// Returns `true` if that host's router may still offer a connection.
    pub(crate) fn awaits(&self, host: IpAddr) -> bool {
        self.state().pending.values().any(|coming| coming.host == host)
    }

    /// Drops Asks whose overlay connection no kernel tries to establish any more.
    pub(crate) fn sweep(&self) {
        let old = self.state().pending.take_if(|coming| coming.since.elapsed() > CONNECTING);
        // Dropped outside of the lock, because it notifies tasks that take it.
        drop(old);
    }

    /// Closes lines whose key is no longer valid.
    pub(crate) fn renew(&self, keys: &Keys) {
        for guest in self.state().guests.values().filter(|guest| !keys.contain(guest.line.key())) {
            guest.line.close();
        }
    }

    /// Returns the number of lines.
    pub(crate) fn count(&self) -> usize {
        self.state().guests.len()
    }

    /// Makes every other router forget the answers that it remembers. Closes the line of each one
    /// that has not confirmed within `limit`: it has to ask anew.
    pub(crate) async fn forget(&self, limit: Duration) {
        let guests: Vec<_> = self.state().guests.values().cloned().collect();
        let sent = guests.into_iter().filter_map(|guest| Some((guest.send_forget()?, guest)));
        let sent: Vec<_> = sent.collect();
        let deadline = Instant::now() + limit;
        for (number, guest) in sent {
            let left = deadline.saturating_duration_since(Instant::now());
            if timeout(left, guest.has_forgotten(number)).await.is_err() {
                guest.line.close();
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl Guest {
    /// Handles the messages that have arrived.
    fn listen(&self, shared: &Arc<Shared>, id: u64, via: Via) -> Result<(), WireError> {
        let mut receiver = lock(&self.receiver);
        while let Some(message) = self.line.try_receive(&mut receiver, via)? {
            match message {
                Message::Ask { number, ask, ticket, follows } => {
                    self.answer(shared, (id, number), (ask, follows), ticket);
                }
                Message::Never { number } => {
                    let coming = shared.guests.state().pending.take_number(id, number);
                    // Dropped outside of the lock, because it notifies tasks that take it.
                    drop(coming);
                }
                Message::Forgotten { number } => {
                    lock(&self.forgotten).confirmed = number;
                    self.changed.notify_waiters();
                }
                _ => return Err(WireError::Stranger),
            }
        }
        Ok(())
    }

    fn answer(&self, shared: &Arc<Shared>, (id, number): (u64, u32), asked: (Ask, bool), ticket: Ticket) {
        let coming = consider(shared, self.host, asked, (ticket, self.line.version()));
        let refused = coming.as_ref().err().copied();
        if let Ok(coming) = coming {
            // Recorded before the answer is sent, so that the offer finds it.
            let replaced = shared.guests.state().pending.add((id, number), ticket.token, coming);
            drop(replaced);
        }
        self.line.send(Message::Answer { number, refused });
    }

    /// Sends Forget, and returns its number. Returns `None` if the line has ended.
    fn send_forget(&self) -> Option<u32> {
        let number = {
            let mut forgotten = lock(&self.forgotten);
            if forgotten.is_over {
                return None;
            }
            forgotten.sent = forgotten.sent.wrapping_add(1);
            forgotten.sent
        };
        self.line.send(Message::Forget { number });
        Some(number)
    }

    async fn has_forgotten(&self, number: u32) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if lock(&self.forgotten).has(number) {
                return;
            }
            changed.await;
        }
    }
}

impl Forgotten {
    /// Returns `true` if nothing is remembered any more that precedes the Forget of that number.
    fn has(&self, number: u32) -> bool {
        // A later Forget may have been confirmed, which includes this one. The numbers wrap around.
        self.is_over || number.wrapping_sub(self.confirmed) as i32 <= 0
    }
}

impl<T> Default for Pending<T> {
    fn default() -> Pending<T> {
        Pending { last_line: 0, lines: HashMap::new(), by_token: HashMap::new() }
    }
}

impl<T> Pending<T> {
    /// Opens a line, and returns its id.
    fn open(&mut self) -> u64 {
        self.last_line += 1;
        self.lines.insert(self.last_line, HashMap::new());
        self.last_line
    }

    /// Closes a line, and returns its values.
    fn close(&mut self, line: u64) -> Vec<T> {
        let tokens = self.lines.remove(&line).unwrap_or_default();
        tokens.values().filter_map(|token| self.take(token)).collect()
    }

    /// Adds the value of an Ask. Returns a value that has no Ask any more: the former one of that
    /// line and number, or this one if the line is closed or another Ask has the token.
    fn add(&mut self, (line, number): (u64, u32), token: Token, value: T) -> Option<T> {
        let Some(tokens) = self.lines.get_mut(&line) else { return Some(value) };
        if self.by_token.contains_key(&token) {
            return Some(value);
        }
        let former = tokens.insert(number, token);
        let former = former.and_then(|former| self.by_token.remove(&former));
        self.by_token.insert(token, (line, number, value));
        former.map(|(_, _, value)| value)
    }

    /// Returns the value of a token.
    fn get(&self, token: &Token) -> Option<&T> {
        self.by_token.get(token).map(|(_, _, value)| value)
    }

    /// Removes the value of a token.
    fn take(&mut self, token: &Token) -> Option<T> {
        let (line, number, value) = self.by_token.remove(token)?;
        if let Some(tokens) = self.lines.get_mut(&line) {
            tokens.remove(&number);
        }
        Some(value)
    }

    /// Removes the value of a line's Ask.
    fn take_number(&mut self, line: u64, number: u32) -> Option<T> {
        let token = *self.lines.get(&line)?.get(&number)?;
        self.take(&token)
    }

    /// Removes the values that `which` selects.
    fn take_if(&mut self, which: impl Fn(&T) -> bool) -> Vec<T> {
        let chosen = self.by_token.iter().filter(|(_, (_, _, value))| which(value));
        let tokens: Vec<Token> = chosen.map(|(token, _)| *token).collect();
        tokens.iter().filter_map(|token| self.take(token)).collect()
    }

    fn values(&self) -> impl ExactSizeIterator<Item = &T> {
        self.by_token.values().map(|(_, _, value)| value)
    }
}

/// Serves a line until it ends.
pub(crate) async fn attend(
    shared: &Arc<Shared>,
    host: IpAddr,
    (line, receiver): (Line, Receiver),
) -> Result<(), WireError> {
    let guest = Arc::new(Guest {
        host,
        line,
        receiver: Mutex::new(receiver),
        forgotten: Mutex::default(),
        changed: Notify::new(),
    });
    let stay = Stay::begin(shared, guest.clone());
    loop {
        guest.listen(shared, stay.id, Via::Reactor)?;
        guest.line.ready().await?;
    }
}

/// Decides about an Ask. The caller holds the line's receive lock and answers before it releases
/// it, so a new policy's Forget follows the answer.
fn consider(
    shared: &Arc<Shared>,
    host: IpAddr,
    (ask, follows): (Ask, bool),
    (ticket, version): (Ticket, u8),
) -> Result<Coming, Reason> {
    let Ask { source, destination } = ask;
    shared.connections.may_permit(Flow { source, source_port: None, destination })?;
    shared.encryption.permit(&shared.loaded(), source, host)?;
    let takers = shared.takers(destination)?;
    shared.knows_labels(takers.cookie)?;
    if shared.guests.state().pending.values().len() >= COMING {
        return Err(Reason::Busy);
    }
    let expected = shared.promises.expect(ask, host, follows);
    Ok(Coming { host, ask, ticket, follows, version, takers, expected, since: Instant::now() })
}

/// A router's line while it is registered.
struct Stay {
    shared: Arc<Shared>,
    id: u64,
}

impl Stay {
    fn begin(shared: &Arc<Shared>, guest: Arc<Guest>) -> Stay {
        let mut state = shared.guests.state();
        let id = state.pending.open();
        state.guests.insert(id, guest);
        Stay { shared: shared.clone(), id }
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut state = self.shared.guests.state();
        // The router has no line any more, so it remembers nothing, and no task needs to wait for
        // it.
        if let Some(guest) = state.guests.remove(&self.id) {
            lock(&guest.forgotten).is_over = true;
            guest.changed.notify_waiters();
        }
        let gone = state.pending.close(self.id);
        drop(state);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(byte: u8) -> Token {
        [byte; 32]
    }

    #[test]
    fn an_ask_with_the_number_of_another_one_replaces_it() {
        let mut pending = Pending::default();
        let line = pending.open();
        assert_eq!(pending.add((line, 1), token(1), "former"), None);
        assert_eq!(pending.add((line, 1), token(2), "later"), Some("former"));
        assert_eq!(pending.take(&token(1)), None);
        assert_eq!(pending.take_number(line, 1), Some("later"));
        assert!(pending.by_token.is_empty() && pending.lines[&line].is_empty());
    }

    #[test]
    fn a_token_that_another_line_has_sent_is_not_taken_over() {
        let mut pending = Pending::default();
        let (line, hostile) = (pending.open(), pending.open());
        assert_eq!(pending.add((line, 1), token(1), "own"), None);
        assert_eq!(pending.add((hostile, 1), token(1), "hostile"), Some("hostile"));
        assert_eq!(pending.close(hostile), Vec::<&str>::new());
        assert_eq!(pending.get(&token(1)), Some(&"own"));
        assert_eq!(pending.take_number(line, 1), Some("own"));
        assert_eq!(pending.get(&token(1)), None);
    }

    #[test]
    fn an_ask_of_a_line_that_has_ended_is_not_kept() {
        let mut pending = Pending::default();
        let (ended, other) = (pending.open(), pending.open());
        assert_eq!(pending.add((ended, 1), token(1), "before"), None);
        assert_eq!(pending.add((other, 1), token(2), "other"), None);
        assert_eq!(pending.close(ended), ["before"]);
        assert_eq!(pending.add((ended, 2), token(3), "after"), Some("after"));
        assert_eq!(pending.take_number(ended, 1), None);
        assert_eq!(pending.values().collect::<Vec<_>>(), [&"other"]);
        assert_eq!(pending.take_if(|value| *value == "other"), ["other"]);
        assert!(pending.lines[&other].is_empty());
    }

    #[test]
    fn a_line_that_has_ended_has_forgotten_everything() {
        let forgotten = Forgotten { sent: 2, confirmed: u32::MAX, is_over: false };
        assert!(forgotten.has(u32::MAX) && !forgotten.has(0));
        assert!(Forgotten { is_over: true, ..forgotten }.has(2));
    }
}
