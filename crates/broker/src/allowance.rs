//! How much processor time somebody may have of the broker's, measured by the clock of the thread.
//!
//! A system call on a stranger's file can take the kernel a fifth of a second, although it never
//! sleeps: a write to an eventfd or to a socket walks the list of everybody who watches that file,
//! which its owner can make a million entries long. What such a call has cost is known only
//! afterwards. So it is a debt, which is paid off with time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::principal::{Account, Principal};

/// What may be owed before anything is put off.
const BURST: Duration = Duration::from_millis(50);
/// Of so much time that passes, a unit is paid off: a fiftieth of a processor.
const SHARE: u32 = 50;

/// What a call on a socket costs where nothing is wrong, with room: it creates no debt.
const ORDINARY: Duration = Duration::from_micros(100);

/// What somebody owes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    debt: Duration,
    at: Instant,
}

impl Allowance {
    pub(crate) fn new(now: Instant) -> Allowance {
        Allowance { debt: Duration::ZERO, at: now }
    }

    /// Adds what something has cost.
    pub(crate) fn spend(&mut self, cost: Duration, now: Instant) {
        self.debt = self.owed(now) + cost;
        self.at = now;
    }

    /// Returns how long the next thing is put off.
    pub(crate) fn pause(&self, now: Instant) -> Duration {
        self.owed(now).saturating_sub(BURST) * SHARE
    }

    /// Whether nothing is owed.
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

/// The debts as one client's conversation sees them: those of its account.
#[derive(Clone, Debug)]
pub(crate) struct Credit {
    debts: Rc<Debts>,
    /// None: a privileged client, which is trusted.
    account: Option<Account>,
}

impl Credit {
    pub(crate) fn new(debts: &Rc<Debts>, whose: Principal) -> Credit {
        Credit { debts: debts.clone(), account: whose.account() }
    }

    /// Returns how long the next call on a socket of the account is put off.
    pub(crate) fn pause(&self) -> Duration {
        let Some(account) = self.account else { return Duration::ZERO };
        self.debts.0.borrow().get(&account).map_or(Duration::ZERO, |debt| debt.pause(Instant::now()))
    }

    /// Runs a call on a socket of the account, and charges the account for one that costs too much.
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

/// Runs `work` and returns the processor time that it has taken of this thread.
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
        // A call can be charged for an interrupt that comes in between.
        assert!(credit.pause().is_zero());
    }

    #[test]
    fn time_that_a_thread_sleeps_costs_nothing() {
        let ((), cost) = measured(|| std::thread::sleep(20 * MS));
        assert!(cost < 20 * MS, "{cost:?}");
    }
}
