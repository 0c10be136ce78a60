//! Limits the processor time of the broker that an account may use, measured by the clock of the
//! thread.
//!
//! A system call on a stranger's file can take the kernel a fifth of a second, although it never
//! sleeps. For example, a write to an eventfd or a socket walks the list of all watches of that
//! file, and its owner can add a million of them. The cost of such a call is known only afterwards.
//! So the cost becomes a debt, which shrinks as time passes.
//!
//! Example: a notification takes 70 ms. The debt exceeds [`BURST`] by 20 ms, so the next call is
//! delayed by [`SHARE`] times as much, which is one second.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::principal::{Account, Principal};

/// The debt up to which calls are not delayed.
const BURST: Duration = Duration::from_millis(50);
/// A debt shrinks by one unit per this many units of time. So an account may use a fiftieth of a
/// processor.
const SHARE: u32 = 50;

/// The usual cost of a call on a socket, with a margin. Cheaper calls create no debt.
const ORDINARY: Duration = Duration::from_micros(100);

/// The debt of an account.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    debt: Duration,
    at: Instant,
}

impl Allowance {
    pub(crate) fn new(now: Instant) -> Allowance {
        Allowance { debt: Duration::ZERO, at: now }
    }

    /// Adds the cost of a call.
    pub(crate) fn spend(&mut self, cost: Duration, now: Instant) {
        self.debt = self.owed(now) + cost;
        self.at = now;
    }

    /// Returns how long the next call is delayed.
    pub(crate) fn pause(&self, now: Instant) -> Duration {
        self.owed(now).saturating_sub(BURST) * SHARE
    }

    /// Returns whether there is no debt.
    pub(crate) fn is_clear(&self, now: Instant) -> bool {
        self.owed(now).is_zero()
    }

    fn owed(&self, now: Instant) -> Duration {
        self.debt.saturating_sub(now.saturating_duration_since(self.at) / SHARE)
    }
}

/// The debts of all accounts for calls of the broker's own thread on their control sockets.
#[derive(Debug, Default)]
pub(crate) struct Debts(RefCell<HashMap<Account, Allowance>>);

/// The debt of one client's account.
#[derive(Clone, Debug)]
pub(crate) struct Credit {
    debts: Rc<Debts>,
    /// `None` for a privileged client, which is trusted.
    account: Option<Account>,
}

impl Credit {
    pub(crate) fn new(debts: &Rc<Debts>, whose: Principal) -> Credit {
        Credit { debts: debts.clone(), account: whose.account() }
    }

    /// Returns how long the next call on a socket of the account is delayed.
    pub(crate) fn pause(&self) -> Duration {
        let Some(account) = self.account else { return Duration::ZERO };
        self.debts.0.borrow().get(&account).map_or(Duration::ZERO, |debt| debt.pause(Instant::now()))
    }

    /// Runs a call on a socket of the account. Charges the account if the call costs more than
    /// [`ORDINARY`].
    pub(crate) fn charge<T>(&self, call: impl FnOnce() -> T) -> T {
        let Some(account) = self.account else { return call() };
        let (result, cost) = measured(call);
        if let Some(cost) = cost.checked_sub(ORDINARY).filter(|cost| !cost.is_zero()) {
            let (mut debts, now) = (self.debts.0.borrow_mut(), Instant::now());
            debts.retain(|_, debt| !debt.is_clear(now));
            debts.entry(account).or_insert_with(|| Allowance::new(now)).spend(cost, now);
        }
        result
    }
}

/// Runs `work`. Returns its result and the processor time that it took on this thread.
pub(crate) fn measured<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = thread_time();
    let result = work();
    (result, thread_time().saturating_sub(before))
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::principal::tests::{ROOT, stranger};

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_costs_little_is_never_put_off() {
        let mut now = Instant::now();
        let mut allowance = Allowance::new(now);
        for _ in 0..10_000 {
            assert_eq!(allowance.pause(now), Duration::ZERO);
            allowance.spend(MS / 500, now);
            now += MS / 10;
        }
    }

    #[test]
    fn what_costs_much_has_a_fiftieth_of_a_processor() {
        let start = Instant::now();
        let (mut now, mut spent) = (start, Duration::ZERO);
        let mut allowance = Allowance::new(now);
        while now < start + 100_000 * MS {
            allowance.spend(200 * MS, now);
            spent += 200 * MS;
            now += allowance.pause(now);
        }
        assert!(spent <= (now - start) / SHARE + 250 * MS, "{spent:?}");
        assert!(!allowance.is_clear(now) && allowance.is_clear(now + BURST * SHARE));
    }

    fn compute(time: Duration) {
        let until = thread_time() + time;
        while thread_time() < until {}
    }

    #[test]
    fn calls_that_cost_too_much_put_off_those_of_the_same_account_alone() {
        let debts = Rc::default();
        let credit = |whose| Credit::new(&debts, whose);
        let (slow, same, other) = (credit(stranger(7, 1)), credit(stranger(7, 1)), credit(stranger(8, 1)));
        let mut calls = 0;
        while slow.pause().is_zero() {
            slow.charge(|| compute(40 * MS));
            calls += 1;
        }
        assert!(calls >= 2, "the first is within the burst");
        assert!(!same.pause().is_zero());
        assert!(other.pause().is_zero());
        let trusted = credit(ROOT);
        for _ in 0..4 {
            trusted.charge(|| compute(40 * MS));
        }
        assert!(trusted.pause().is_zero());
    }

    #[test]
    fn calls_that_cost_what_is_usual_create_no_debt() {
        let debts = Rc::default();
        let credit = Credit::new(&debts, stranger(7, 1));
        for _ in 0..1000 {
            credit.charge(|| ());
        }
        // A call can be charged for an interrupt that occurs during it.
        assert!(credit.pause().is_zero());
    }

    #[test]
    fn time_that_a_thread_sleeps_costs_nothing() {
        let ((), cost) = measured(|| std::thread::sleep(20 * MS));
        assert!(cost < 20 * MS, "{cost:?}");
    }
}
