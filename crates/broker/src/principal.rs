//! For whom the broker holds what it holds, and how much of it anybody may have (docs/adr/0019).
//!
//! A uid is not enough to tell clients apart: the root of every container is uid 0. So it is the uid and the network namespace that
//! the control socket was made in, which a client cannot choose afterwards. Anybody can make namespaces, but only
//! such as belong to a user namespace of his own; those of one uid have a common bound.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::rc::Rc;

use rustix::process::getuid;
use shunt_sys::{Errno, identity, netns};

/// Whose client it is, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Principal {
    pub(crate) uid: u32,
    pub(crate) netns: u64,
    standing: Standing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Standing {
    /// Root or the broker's own user, in the broker's own network namespace.
    Privileged,
    /// Anybody else, where nobody but the host's root can make another namespace like this one.
    Stranger,
    /// In a namespace that anybody may have made.
    Homemade,
}

impl Principal {
    /// Whoever has made this control connection. `own` is the broker's network namespace.
    pub(crate) fn of(control: impl AsFd, uid: u32, own: u64) -> Result<Principal, Errno> {
        let netns = identity::namespace(control.as_fd())?;
        let standing = if netns == own {
            if uid == 0 || uid == getuid().as_raw() { Standing::Privileged } else { Standing::Stranger }
        } else if netns::belongs_here(control).unwrap_or(false) {
            Standing::Stranger
        } else {
            Standing::Homemade
        };
        Ok(Principal { uid, netns, standing })
    }

    /// What it is counted under, if it is bounded at all.
    pub(crate) fn account(&self) -> Option<Account> {
        match self.standing {
            Standing::Privileged => None,
            Standing::Stranger => Some(Account::Own(*self)),
            Standing::Homemade => Some(Account::Homemade(self.uid)),
        }
    }

    /// Whether there is nothing that it may not see or use.
    pub(crate) fn is_privileged(&self) -> bool {
        self.standing == Standing::Privileged
    }
}

/// Who has caused the broker to hold something: one principal, or the two at the ends of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Whose(Principal, Principal);

impl From<Principal> for Whose {
    fn from(one: Principal) -> Whose {
        Whose(one, one)
    }
}

impl Whose {
    /// In any order.
    pub(crate) fn both(one: Principal, other: Principal) -> Whose {
        Whose(one.min(other), one.max(other))
    }

    /// Returns the two.
    pub(crate) fn each(self) -> [Principal; 2] {
        [self.0, self.1]
    }

    fn is_one(&self) -> bool {
        self.0 == self.1
    }

    /// What is counted under, for whoever is bounded.
    fn accounts(self) -> impl Iterator<Item = Account> {
        let two = [Some(self.0), (!self.is_one()).then_some(self.1)];
        let strangers = two.into_iter().flatten().filter(|one| !one.is_privileged());
        let each = strangers.flat_map(move |one| {
            let own = if self.is_one() { Account::Own(one) } else { Account::WithOthers(one) };
            let homemade = (one.standing == Standing::Homemade).then_some(Account::Homemade(one.uid));
            [Some(own), homemade].into_iter().flatten()
        });
        each.chain((!self.is_one()).then_some(Account::Pair(self)))
    }

    fn has_stranger(&self) -> bool {
        !self.0.is_privileged() || !self.1.is_privileged()
    }
}

/// What is counted, and bounded, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Account {
    /// What a principal has caused alone. No other can use it up.
    Own(Principal),
    /// What it has caused with others.
    WithOthers(Principal),
    /// What these two have caused.
    Pair(Whose),
    /// What one uid has caused in namespaces that it may have made.
    Homemade(u32),
}

/// A limit, and who has how much of it.
///
/// An eighth is kept for the privileged, who may take everything. A stranger may have a quarter of what is left to strangers, so whatever
/// some have taken there is something for the next; what one uid has in namespaces of its own making may be half of what is left. Of
/// what a principal may have with others, each other may take half of what is left.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    all: usize,
    strangers: usize,
    held: HashMap<Account, usize>,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Budget {
        Budget { limit, all: 0, strangers: 0, held: HashMap::new() }
    }

    /// Takes as much, if it may be had.
    pub(crate) fn take(&mut self, whose: impl Into<Whose>, amount: usize) -> bool {
        let whose = whose.into();
        let allowed = self.allows(whose, amount);
        if allowed {
            self.force(whose, amount);
        }
        allowed
    }

    /// Whether as much may be had.
    pub(crate) fn allows(&self, whose: impl Into<Whose>, amount: usize) -> bool {
        let whose = whose.into();
        if self.all.saturating_add(amount) > self.limit {
            return false;
        }
        if !whose.has_stranger() {
            return true;
        }
        let left = (self.limit - self.limit / 8).saturating_sub(self.strangers);
        let share = (left / 4).max(1);
        let with_others = |one: Principal| match one.is_privileged() {
            true => 0,
            false => self.held(Account::WithOthers(one)),
        };
        let may_have = |account| match account {
            Account::Own(_) | Account::WithOthers(_) => share,
            Account::Homemade(_) => (left / 2).max(1),
            Account::Pair(Whose(one, other)) => {
                share.saturating_sub(with_others(one).max(with_others(other))).max(1)
            }
        };
        let fits = |account| self.held(account).saturating_add(amount) <= may_have(account);
        amount <= left && whose.accounts().all(fits)
    }

    /// Takes what cannot be refused.
    pub(crate) fn force(&mut self, whose: impl Into<Whose>, amount: usize) {
        let whose = whose.into();
        self.all += amount;
        self.strangers += if whose.has_stranger() { amount } else { 0 };
        for account in whose.accounts() {
            *self.held.entry(account).or_default() += amount;
        }
    }

    /// Gives back what was taken.
    pub(crate) fn give(&mut self, whose: impl Into<Whose>, amount: usize) {
        let whose = whose.into();
        self.all -= amount;
        self.strangers -= if whose.has_stranger() { amount } else { 0 };
        for account in whose.accounts() {
            if let Some(held) = self.held.get_mut(&account) {
                *held -= amount;
                if *held == 0 {
                    self.held.remove(&account);
                }
            }
        }
    }

    /// How much all have.
    pub(crate) fn all(&self) -> usize {
        self.all
    }

    /// How much a stranger has, alone and with others.
    pub(crate) fn of(&self, one: Principal) -> usize {
        self.held(Account::Own(one)) + self.held(Account::WithOthers(one))
    }

    fn held(&self, account: Account) -> usize {
        self.held.get(&account).copied().unwrap_or(0)
    }
}

/// What somebody has of a budget; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Rc<RefCell<Budget>>,
    whose: Whose,
    amount: usize,
}

impl Charge {
    /// Nothing yet.
    pub(crate) fn new(budget: &Rc<RefCell<Budget>>, whose: impl Into<Whose>) -> Charge {
        Charge { budget: budget.clone(), whose: whose.into(), amount: 0 }
    }

    /// Comes to have so much, if it may be had.
    pub(crate) fn set(&mut self, amount: usize) -> bool {
        if amount > self.amount {
            return self.more(amount - self.amount);
        }
        self.less(self.amount - amount);
        true
    }

    /// Takes more, if it may be had.
    pub(crate) fn more(&mut self, amount: usize) -> bool {
        let taken = self.budget.borrow_mut().take(self.whose, amount);
        self.amount += if taken { amount } else { 0 };
        taken
    }

    /// Returns how much it has.
    pub(crate) fn amount(&self) -> usize {
        self.amount
    }

    /// Gives some of it back.
    pub(crate) fn less(&mut self, amount: usize) {
        self.amount -= amount;
        self.budget.borrow_mut().give(self.whose, amount);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.less(self.amount);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) const ROOT: Principal = Principal { uid: 0, netns: 1, standing: Standing::Privileged };

    /// Another user in the broker's own namespace, or the root of a container.
    pub(crate) fn stranger(uid: u32, netns: u64) -> Principal {
        Principal { uid, netns, standing: Standing::Stranger }
    }

    fn homemade(uid: u32, netns: u64) -> Principal {
        Principal { uid, netns, standing: Standing::Homemade }
    }

    /// As much as it gets.
    fn fill(budget: &mut Budget, whose: impl Into<Whose> + Copy) -> usize {
        std::iter::repeat_with(|| budget.take(whose, 1)).take_while(|taken| *taken).count()
    }

    #[test]
    fn a_stranger_leaves_most_to_others_and_the_privileged_may_have_all() {
        let mut budget = Budget::new(1000);
        assert_eq!(fill(&mut budget, stranger(0, 2)), 175);
        assert_eq!(fill(&mut budget, stranger(0, 3)), 140, "the root of another container");
        assert_eq!(fill(&mut budget, stranger(7, 1)), 112);
        assert_eq!(fill(&mut budget, ROOT), 1000 - 175 - 140 - 112);
        assert_eq!(budget.all(), 1000);
        assert!(!budget.allows(stranger(8, 1), 1));
    }

    #[test]
    fn whoever_makes_namespaces_has_no_more_for_it() {
        let mut budget = Budget::new(1000);
        let taken: usize = (2..500).map(|netns| fill(&mut budget, homemade(1000, netns))).sum();
        assert_eq!(taken, 292);
        assert_eq!(fill(&mut budget, stranger(33, 1)), 116);
    }

    #[test]
    fn there_is_something_for_the_next_after_thirty_who_have_taken_what_they_could() {
        let mut budget = Budget::new(4096);
        (0..20).for_each(|netns| assert!(fill(&mut budget, stranger(0, netns)) > 0));
        assert!(fill(&mut budget, stranger(0, 99)) >= 5);
        assert!(fill(&mut budget, ROOT) >= 512);
    }

    #[test]
    fn what_one_causes_with_another_takes_nothing_of_what_is_its_own() {
        let mut budget = Budget::new(16_384);
        let (server, client) = (stranger(0, 2), stranger(0, 3));
        let taken = fill(&mut budget, Whose::both(client, server));
        assert!(taken > 1000 && !budget.allows(Whose::both(server, client), 1), "{taken}");
        // The server has something for the next, and for itself.
        let next = fill(&mut budget, Whose::both(server, stranger(0, 4)));
        assert!(next > 300, "{next}");
        assert!(fill(&mut budget, server) > 1000);
        // With the privileged it is only the stranger's.
        assert!(fill(&mut budget, Whose::both(ROOT, stranger(0, 5))) > 500);
        assert!(fill(&mut budget, Whose::both(ROOT, stranger(0, 6))) > 500);
    }

    #[test]
    fn a_charge_ends_with_whoever_has_it() {
        let budget = Rc::new(RefCell::new(Budget::new(100)));
        let mut charge = Charge::new(&budget, stranger(7, 1));
        assert!(charge.more(5) && charge.more(5) && !charge.more(50));
        charge.less(3);
        assert_eq!((budget.borrow().all(), budget.borrow().of(stranger(7, 1))), (7, 7));
        drop(charge);
        assert_eq!(budget.borrow().all(), 0);
        assert!(budget.borrow().held.is_empty());
    }

    proptest! {
        #[test]
        fn what_is_given_back_leaves_nothing(steps in proptest::collection::vec((0..5u64, 0..5u64, 1..9usize), 0..60)) {
            let who = |at: u64| match at {
                0 => ROOT,
                1 | 2 => stranger(at as u32, at),
                _ => homemade(9, at),
            };
            let mut budget = Budget::new(100);
            let mut taken = Vec::new();
            for (one, other, amount) in steps {
                let whose = Whose::both(who(one), who(other));
                if budget.take(whose, amount) {
                    taken.push((whose, amount));
                }
                prop_assert!(budget.all() <= 100 && budget.strangers <= 88);
            }
            for (whose, amount) in taken {
                budget.give(whose, amount);
            }
            prop_assert!(budget.all() == 0 && budget.strangers == 0 && budget.held.is_empty());
        }
    }
}
