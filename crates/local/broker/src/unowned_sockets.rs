//! Follows sockets of processes that have ended, where TCP reports too little to the peer. There
//! are two kinds. A socket that was shut down and shared with child processes: the peer has
//! received the FIN long ago. And a socket with unread bytes of the peer in a lane: the FIN may
//! wait behind all that the peer has no room for. TCP would reset the connection once no process
//! holds the socket, so the broker asks the kernel whether one still does.
//!
//! A child may hold such a socket for days, and one user may leave hundreds of thousands. So each
//! socket is queried less and less often, see [`pause`], and each account has a budget of queries.
//! Delays that follow from this affect only that account. See *Ends* in docs/local-path.md.
//!
//! Example: a child closes its copy of such a socket 40 ms after the parent has exited. Queries
//! follow after 0, 1, 2, 4, 8, 16, 32 and 64 ms. The last one finds no holder, and the peer is
//! notified.

use std::cell::RefCell;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::sleep_until;

use crate::links::UnownedSocket;
use crate::principal::{Account, Principal};
use crate::state::State;

/// The delay between the first two queries.
const FIRST: Duration = Duration::from_millis(1);
/// Up to this age the delay equals the age, so the age doubles between two queries.
const YOUNG: Duration = Duration::from_secs(1);
/// Beyond that, the delay is this fraction of the age, and [`LAST`] at most.
const PART: u32 = 16;
const LAST: Duration = Duration::from_secs(60);
/// The charge for a query to an account, which earns one second of budget per second. A query takes
/// the broker 4 us.
const COST: Duration = Duration::from_micros(500);
/// Number of queries that an account may make in a row after a time without any.
const BURST: u32 = 8192;
/// Number of queries after which the broker's thread serves others.
const BATCH: usize = 128;

/// Returns the delay until the next query about a socket of this age.
fn pause(age: Duration) -> Duration {
    if age < YOUNG { age.max(FIRST) } else { (age / PART).clamp(YOUNG, LAST) }
}

/// A queue of sockets to query.
#[derive(Debug, Default)]
pub(crate) struct UnownedSockets {
    lines: Vec<Line>,
    /// Index of the account that is served first next time.
    turn: usize,
    added: u64,
    /// Notified when a socket is due earlier than all others.
    changed: Rc<Notify>,
}

/// The sockets of one account, or of all privileged principals, which have no account.
#[derive(Debug)]
struct Line {
    account: Option<Account>,
    followed: BinaryHeap<Reverse<Followed>>,
    /// The time at which all queries so far are paid for.
    paid_at: Instant,
}

#[derive(Debug)]
struct Followed {
    due: Instant,
    /// A sequence number that orders sockets with equal due times.
    number: u64,
    since: Instant,
    socket: UnownedSocket,
}

impl Followed {
    fn order(&self) -> (Instant, u64) {
        (self.due, self.number)
    }
}

impl PartialEq for Followed {
    fn eq(&self, other: &Followed) -> bool {
        self.order() == other.order()
    }
}

impl Eq for Followed {}

impl PartialOrd for Followed {
    fn partial_cmp(&self, other: &Followed) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Followed {
    fn cmp(&self, other: &Followed) -> Ordering {
        self.order().cmp(&other.order())
    }
}

impl Line {
    /// Returns when the next query of this account may run.
    fn due(&self) -> Option<Instant> {
        let Reverse(first) = self.followed.peek()?;
        let allowed = self.paid_at.checked_sub(COST * BURST);
        Some(allowed.map_or(first.due, |allowed| allowed.max(first.due)))
    }

    fn take(&mut self, now: Instant) -> Option<Followed> {
        self.due().filter(|due| *due <= now)?;
        self.paid_at = self.paid_at.max(now) + COST;
        self.followed.pop().map(|Reverse(followed)| followed)
    }
}

impl UnownedSockets {
    /// Follows a socket. The first query is due immediately.
    pub(crate) fn add(&mut self, whose: Principal, socket: UnownedSocket, now: Instant) {
        self.added += 1;
        let followed = Followed { due: now, number: self.added, since: now, socket };
        self.put(whose.account(), followed, now);
        self.changed.notify_one();
    }

    fn put(&mut self, account: Option<Account>, followed: Followed, now: Instant) {
        let place = self.lines.iter().position(|line| line.account == account);
        let place = place.unwrap_or_else(|| {
            self.lines.push(Line { account, followed: BinaryHeap::new(), paid_at: now });
            self.lines.len() - 1
        });
        self.lines[place].followed.push(Reverse(followed));
    }

    /// Returns when the next query is due, if any socket is followed.
    fn due(&self) -> Option<Instant> {
        self.lines.iter().filter_map(Line::due).min()
    }

    /// Takes a socket that is due. Accounts are served in round-robin order.
    fn take(&mut self, now: Instant) -> Option<(Option<Account>, Followed)> {
        let count = self.lines.len();
        let places = (self.turn..self.turn + count).map(|place| place % count);
        let (place, followed) =
            places.into_iter().find_map(|place| Some((place, self.lines[place].take(now)?)))?;
        self.turn = place + 1;
        Some((self.lines[place].account, followed))
    }

    /// Queues a socket again that a process still holds.
    fn put_back(&mut self, account: Option<Account>, followed: Followed, now: Instant) {
        let due = now + pause(now.saturating_duration_since(followed.since));
        self.put(account, Followed { due, ..followed }, now);
    }

    /// Removes accounts that have no sockets and no debt left.
    fn tidy(&mut self, now: Instant) {
        self.lines.retain(|line| !line.followed.is_empty() || line.paid_at > now);
    }
}

/// Notifies the peers of followed sockets once no process holds these any more. Mostly that is so
/// at the first query.
pub(crate) async fn follow(state: Rc<RefCell<State>>) {
    let changed = state.borrow().unowned.changed.clone();
    loop {
        // Evaluated outside the match, which would keep the state borrowed.
        let due = state.borrow().unowned.due();
        match due {
            None => changed.notified().await,
            Some(due) => {
                tokio::select! {
                    () = sleep_until(due.into()) => {}
                    () = changed.notified() => {}
                }
            }
        }
        ask(&mut state.borrow_mut(), Instant::now());
        yield_now().await;
    }
}

fn ask(state: &mut State, now: Instant) {
    for _ in 0..BATCH {
        let Some((account, followed)) = state.unowned.take(now) else { break };
        if !is_over(state, &followed.socket) {
            state.unowned.put_back(account, followed, now);
        }
    }
    state.unowned.tidy(now);
}

/// Returns whether a socket needs no more queries, because the peer was notified or no process
/// would notice. In that case it also leaves the socket's namespace.
fn is_over(state: &mut State, socket: &UnownedSocket) -> bool {
    let is_heard = state.links.is_heard(socket.place);
    if is_heard && is_held(state, socket) {
        return false;
    }
    if is_heard {
        state.ring(state.links.say_abandoned(socket.place));
    }
    state.links.end_following(socket.place);
    state.namespaces.leave(socket.key.netns);
    true
}

/// Returns whether a process holds the socket. An unanswered query counts as yes.
fn is_held(state: &mut State, socket: &UnownedSocket) -> bool {
    match state.namespaces.find(socket.key, socket.cookie) {
        Ok(found) => found.is_some_and(|found| found.is_held),
        Err(error) => {
            tracing::debug!(%error, "sock_diag does not answer");
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::Place;
    use crate::pairing::Key;
    use crate::principal::tests::{ROOT, stranger};
    use shunt_abi::geometry::Side;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    fn socket(cookie: u64) -> UnownedSocket {
        let address = "127.0.0.1:1".parse().unwrap();
        let key = Key { netns: 1, local: address, remote: address };
        UnownedSocket { place: Place { link: 1, conn: 0, side: Side::A }, cookie, key }
    }

    fn with(whose: Principal, count: u64, now: Instant) -> UnownedSockets {
        let mut unowned = UnownedSockets::default();
        (0..count).for_each(|cookie| unowned.add(whose, socket(cookie), now));
        unowned
    }

    /// Runs all due queries until `end`, and treats each socket as still held. Returns the time and
    /// the socket of each query.
    fn run(unowned: &mut UnownedSockets, now: &mut Instant, end: Instant) -> Vec<(Instant, u64)> {
        let mut asked = Vec::new();
        while *now < end {
            while let Some((account, followed)) = unowned.take(*now) {
                asked.push((*now, followed.socket.cookie));
                unowned.put_back(account, followed, *now);
            }
            *now = unowned.due().unwrap_or(end).max(*now + MS / 10);
        }
        asked
    }

    #[test]
    fn one_is_asked_about_at_once_then_soon_then_ever_less_often() {
        let start = Instant::now();
        let mut unowned = with(ROOT, 1, start);
        let asked = run(&mut unowned, &mut { start }, start + 7200 * SECOND);
        let ages: Vec<Duration> = asked.iter().map(|(at, _)| *at - start).collect();
        assert_eq!(ages[..5], [0, 1, 2, 4, 8].map(|age| age * MS));
        for pair in ages.windows(2) {
            let late = pair[1] - pair[0];
            assert!(late <= FIRST.max(pair[0]).min(YOUNG.max(pair[0] / PART).min(LAST)), "{pair:?}");
        }
        assert!(ages.len() < 250, "{} questions in two hours", ages.len());
    }

    #[test]
    fn six_thousand_take_less_than_a_thousandth_of_a_processor() {
        const QUESTION: Duration = Duration::from_micros(4);
        let start = Instant::now();
        let mut unowned = with(ROOT, 6000, start);
        let mut now = start;
        // The first queries run without a delay.
        assert_eq!(run(&mut unowned, &mut now, start + MS).len(), 6000);
        run(&mut unowned, &mut now, start + 900 * SECOND);
        let hour = run(&mut unowned, &mut now, start + 4500 * SECOND).len() as u32;
        assert!(hour * QUESTION < 3600 * SECOND / 1000, "{hour} questions in an hour");
    }

    #[test]
    fn who_has_very_many_delays_only_his_own() {
        let start = Instant::now();
        let (many, one) = (stranger(7, 1), stranger(8, 1));
        let mut unowned = with(many, 229_000, start);
        unowned.add(one, socket(u64::MAX), start);
        let mut now = start;
        let asked = run(&mut unowned, &mut now, start + 300 * SECOND);
        let (of_one, of_many): (Vec<_>, Vec<_>) = asked.iter().partition(|(_, cookie)| *cookie == u64::MAX);
        assert_eq!(
            of_one[..4].iter().map(|(at, _)| *at - start).collect::<Vec<_>>(),
            [0, 1, 2, 4].map(|age| age * MS)
        );
        // The budget holds, and every socket is queried.
        let most = 300 * SECOND.as_micros() / COST.as_micros() + u128::from(BURST) + 1;
        assert!(of_many.len() as u128 <= most, "{} questions", of_many.len());
        let mut all: Vec<u64> = of_many.iter().map(|(_, cookie)| *cookie).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 229_000);
    }

    #[test]
    fn who_has_none_left_is_forgotten() {
        let start = Instant::now();
        let mut unowned = with(ROOT, 3, start);
        while unowned.take(start).is_some() {}
        assert_eq!(unowned.due(), None);
        unowned.tidy(start);
        assert_eq!(unowned.lines.len(), 1, "what it has asked is not paid for");
        unowned.tidy(start + SECOND);
        assert_eq!(unowned.lines.len(), 0);
    }
}
