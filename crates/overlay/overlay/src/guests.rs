//! The lines that other routers keep to this one: their Asks, and the answers to them. `peers` has
//! the lines in the other direction.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shunt_key::Keys;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::lock::lock;
use crate::policy::Flow;
use crate::reason::Reason;
use crate::shared::{Expected, Shared, Takers};
use crate::wire::{Ask, Ear, Line, Token, When, WireError, Word};

/// All incoming lines.
#[derive(Debug, Default)]
pub(crate) struct Guests(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    guests: HashMap<u64, Arc<Guest>>,
    /// The Asks that were answered with yes and not yet offered.
    coming: HashMap<Token, Coming>,
}

#[derive(Debug)]
struct Guest {
    host: IpAddr,
    line: Line,
    ear: Mutex<Ear>,
    /// The tokens of this line's pending Asks, by number.
    asked: Mutex<HashMap<u32, Token>>,
    /// The number of the last Forget that was sent, and of the last one that was confirmed.
    forgotten: Mutex<(u32, u32)>,
    changed: Notify,
}

/// A connection that another router has asked for, and may offer.
#[derive(Debug)]
pub(crate) struct Coming {
    pub(crate) host: IpAddr,
    pub(crate) ask: Ask,
    pub(crate) takers: Takers,
    /// Held until the connection is offered, or will not be.
    pub(crate) expected: Expected,
    guest: u64,
    number: u32,
    since: Instant,
}

/// The largest number of Asks that may be pending.
const COMING: usize = 16_384;
/// The time after which no offer can follow an Ask. The kernel gives up an unanswered SYN after a
/// little more than two minutes.
pub(crate) const CONNECTING: Duration = Duration::from_secs(180);

impl Guests {
    /// Takes the Ask of an offered connection. Each token is taken once.
    pub(crate) fn take(&self, token: &Token) -> Option<Coming> {
        let (coming, guest) = {
            let mut state = self.state();
            let coming = state.coming.remove(token)?;
            let guest = state.guests.get(&coming.guest).cloned();
            (coming, guest)
        };
        if let Some(guest) = guest {
            lock(&guest.asked).remove(&coming.number);
        }
        Some(coming)
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
            if guest.listen(shared, id, When::Looking).is_err() {
                guest.line.close();
            }
        }
    }

    /// Returns `true` if that host's router may still offer a connection.
    pub(crate) fn awaits(&self, host: IpAddr) -> bool {
        self.state().coming.values().any(|coming| coming.host == host)
    }

    /// Drops Asks whose overlay connection no kernel tries to establish any more.
    pub(crate) fn sweep(&self) {
        let is_old = |coming: &Coming| coming.since.elapsed() > CONNECTING;
        let old: Vec<Token> = {
            let state = self.state();
            state.coming.iter().filter(|(_, coming)| is_old(coming)).map(|(token, _)| *token).collect()
        };
        for token in old {
            drop(self.take(&token));
        }
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
        let told: Vec<_> = guests.into_iter().map(|guest| (guest.tell(), guest)).collect();
        let deadline = Instant::now() + limit;
        for (number, guest) in told {
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
    fn listen(&self, shared: &Arc<Shared>, id: u64, when: When) -> Result<(), WireError> {
        let mut ear = lock(&self.ear);
        while let Some((word, token)) = self.line.heard(&mut ear, when)? {
            match word {
                Word::Ask { number, ask } => self.answer(shared, id, (number, ask), token),
                Word::Never { number } => {
                    let token = lock(&self.asked).get(&number).copied();
                    // Dropped outside of the locks, because it notifies tasks that take them.
                    drop(token.and_then(|token| shared.guests.take(&token)));
                }
                Word::Forgotten { number } => {
                    lock(&self.forgotten).1 = number;
                    self.changed.notify_waiters();
                }
                _ => return Err(WireError::Stranger),
            }
        }
        Ok(())
    }

    fn answer(&self, shared: &Arc<Shared>, id: u64, (number, ask): (u32, Ask), token: Token) {
        let coming = consider(shared, self.host, (number, ask), id);
        let refused = coming.as_ref().err().copied();
        if let Ok(coming) = coming {
            // Recorded before the answer is sent, so that the offer finds it.
            lock(&self.asked).insert(number, token);
            shared.guests.state().coming.insert(token, coming);
        }
        self.line.say(Word::Answer { number, refused });
    }

    fn tell(&self) -> u32 {
        let number = {
            let mut forgotten = lock(&self.forgotten);
            forgotten.0 = forgotten.0.wrapping_add(1);
            forgotten.0
        };
        self.line.say(Word::Forget { number });
        number
    }

    async fn has_forgotten(&self, number: u32) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            // A later Forget may have been confirmed, which includes this one. The numbers wrap
            // around.
            if number.wrapping_sub(lock(&self.forgotten).1) as i32 <= 0 {
                return;
            }
            changed.await;
        }
    }
}

/// Serves a line until it ends.
pub(crate) async fn attend(
    shared: &Arc<Shared>,
    host: IpAddr,
    (line, ear): (Line, Ear),
) -> Result<(), WireError> {
    let guest = Arc::new(Guest {
        host,
        line,
        ear: Mutex::new(ear),
        asked: Mutex::default(),
        forgotten: Mutex::default(),
        changed: Notify::new(),
    });
    let stay = Stay::begin(shared, guest.clone());
    loop {
        guest.line.ready().await?;
        guest.listen(shared, stay.id, When::Told)?;
    }
}

/// Decides about an Ask. The caller holds the line's receive lock and answers before it releases
/// it, so a new policy's Forget follows the answer.
fn consider(
    shared: &Arc<Shared>,
    host: IpAddr,
    (number, ask): (u32, Ask),
    guest: u64,
) -> Result<Coming, Reason> {
    let Ask { source, destination } = ask;
    shared.connections.permit(Flow { source, destination })?;
    let takers = shared.takers(destination)?;
    if shared.guests.state().coming.len() >= COMING {
        return Err(Reason::Busy);
    }
    let expected = shared.expect(ask, host);
    Ok(Coming { host, ask, takers, expected, guest, number, since: Instant::now() })
}

/// A router's line while it is registered.
struct Stay {
    shared: Arc<Shared>,
    id: u64,
}

impl Stay {
    fn begin(shared: &Arc<Shared>, guest: Arc<Guest>) -> Stay {
        let mut state = shared.guests.state();
        let id = state.next;
        state.next += 1;
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
            let mut forgotten = lock(&guest.forgotten);
            forgotten.1 = forgotten.0;
            guest.changed.notify_waiters();
        }
        let gone: Vec<_> = state.coming.extract_if(|_, coming| coming.guest == self.id).collect();
        drop(state);
        drop(gone);
    }
}
