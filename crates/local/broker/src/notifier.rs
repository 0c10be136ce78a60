//! Notifies waiters through their doorbells, on the [pool](crate::blocking_pool) for calls that may
//! take long.
//!
//! A doorbell is a client's file. A write to it never sleeps, but takes longer the more watches the
//! file has: see [`crate::allowance`]. So the broker's own thread does not do it. Each account has
//! at most one thread at a time for its doorbells, and a budget of time. An account that has used
//! up its budget is delayed, without effect on others. A doorbell that is already queued is not
//! queued again, because one notification covers all earlier events.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use shunt_sys::eventfd;

use crate::allowance::{Allowance, measured};
use crate::blocking_pool::{ClientFd, Pool};
use crate::principal::{Account, Principal};

/// A client's doorbell.
#[derive(Debug)]
pub(crate) struct Doorbell {
    fd: ClientFd,
    is_queued: AtomicBool,
}

impl Doorbell {
    pub(crate) fn new(fd: ClientFd) -> Doorbell {
        Doorbell { fd, is_queued: AtomicBool::new(false) }
    }

    fn notify(&self) {
        // Cleared before the write: later events need another notification.
        self.is_queued.store(false, SeqCst);
        // If the write fails, only the doorbell's owner is affected.
        let _ = eventfd::ring(self);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A queue of doorbells; see the module.
#[derive(Debug)]
pub(crate) struct Notifier {
    pool: Pool,
    lines: Arc<Mutex<Lines>>,
}

/// One queue per account. Privileged principals share one, and have no budget.
type Lines = HashMap<Option<Account>, Line>;

/// The doorbells of one account.
#[derive(Debug)]
struct Line {
    waiting: VecDeque<Arc<Doorbell>>,
    /// Set while a thread serves this queue.
    is_served: bool,
    allowance: Allowance,
}

impl Notifier {
    pub(crate) fn new(pool: Pool) -> Notifier {
        Notifier { pool, lines: Arc::default() }
    }

    /// Returns whether notifications are queued or under way.
    pub(crate) fn is_busy(&self) -> bool {
        lock(&self.lines).values().any(|line| line.is_served)
    }

    /// Queues a notification.
    pub(crate) fn notify(&self, whose: Principal, doorbell: &Arc<Doorbell>) {
        if doorbell.is_queued.swap(true, SeqCst) {
            return;
        }
        let (account, now) = (whose.account(), Instant::now());
        let mut lines = lock(&self.lines);
        lines.retain(|_, line| line.is_served || !line.allowance.is_clear(now));
        let line = lines.entry(account).or_insert_with(|| Line {
            waiting: VecDeque::new(),
            is_served: false,
            allowance: Allowance::new(now),
        });
        line.waiting.push_back(doorbell.clone());
        if !std::mem::replace(&mut line.is_served, true) {
            let lines = self.lines.clone();
            self.pool.run(whose, move || serve(&lines, account));
        }
    }
}

fn lock(lines: &Mutex<Lines>) -> MutexGuard<'_, Lines> {
    lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Notifies the doorbells of an account until its queue is empty.
fn serve(lines: &Mutex<Lines>, account: Option<Account>) {
    let mut cost = None;
    loop {
        let (doorbell, pause) = {
            let (mut lines, now) = (lock(lines), Instant::now());
            let Some(line) = lines.get_mut(&account) else { return };
            if let Some(cost) = cost.take().filter(|_| account.is_some()) {
                line.allowance.spend(cost, now);
            }
            let Some(doorbell) = line.waiting.pop_front() else {
                line.is_served = false;
                return;
            };
            (doorbell, line.allowance.pause(now))
        };
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let ((), took) = measured(|| doorbell.notify());
        cost = Some(took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocking_pool;
    use crate::blocking_pool::tests::settled;
    use crate::principal::tests::{ROOT, stranger};
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    fn doorbell(pool: &Pool, whose: Principal) -> (Arc<Doorbell>, OwnedFd) {
        let fd = eventfd::create().unwrap();
        let listener = eventfd::listen(&fd).unwrap();
        (Arc::new(Doorbell::new(ClientFd::new(pool, whose, fd))), listener)
    }

    #[track_caller]
    fn expect_heard(listener: &OwnedFd) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !eventfd::heard(listener).unwrap() {
            assert!(Instant::now() < deadline, "nobody was notified");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn each_notification_arrives() {
        let pool = blocking_pool::start().unwrap();
        let notifier = Notifier::new(pool.clone());
        for whose in [ROOT, stranger(7, 1)] {
            let (doorbell, listener) = doorbell(&pool, whose);
            for _ in 0..100 {
                notifier.notify(whose, &doorbell);
                expect_heard(&listener);
            }
            settled(&pool, whose, 0);
        }
    }

    #[test]
    fn who_has_used_up_the_time_waits_and_nobody_else_does() {
        let pool = blocking_pool::start().unwrap();
        let notifier = Notifier::new(pool.clone());
        let (attacker, other) = (stranger(7, 1), stranger(8, 1));
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        allowance.spend(Duration::from_secs(3600), now);
        let line = Line { waiting: VecDeque::new(), is_served: false, allowance };
        lock(&notifier.lines).insert(attacker.account(), line);
        let ((slow, unheard), (fast, heard)) = (doorbell(&pool, attacker), doorbell(&pool, other));
        for _ in 0..100 {
            notifier.notify(attacker, &slow);
            notifier.notify(other, &fast);
            expect_heard(&heard);
        }
        // One thread is delayed, with one notification.
        assert_eq!(pool.pending(attacker), 1);
        assert!(lock(&notifier.lines)[&attacker.account()].waiting.is_empty());
        assert!(!eventfd::heard(&unheard).unwrap());
        settled(&pool, other, 0);
    }

    #[test]
    fn lines_of_who_owes_nothing_are_forgotten() {
        let pool = blocking_pool::start().unwrap();
        let notifier = Notifier::new(pool.clone());
        for uid in 1..100 {
            let (doorbell, listener) = doorbell(&pool, stranger(uid, 1));
            notifier.notify(stranger(uid, 1), &doorbell);
            expect_heard(&listener);
            settled(&pool, stranger(uid, 1), 0);
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while lock(&notifier.lines).len() > 1 {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(2));
            let (doorbell, _listener) = doorbell(&pool, ROOT);
            notifier.notify(ROOT, &doorbell);
        }
    }
}
