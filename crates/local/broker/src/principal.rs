//! Principals, to which the broker charges what it holds, and the budgets that limit each of them
//! (docs/adr/0019).
//!
//! A uid alone does not distinguish clients: the root user of every container is uid 0. So a
//! principal consists of the uid and the network namespace in which the control socket was made,
//! which a client cannot change afterwards. Any user can make network namespaces, but only below a
//! user namespace that it has made too. Therefore the namespaces of one uid share a limit.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::rc::Rc;

use rustix::process::getuid;
use shunt_sys::{Errno, identity, netns};

/// The user and the network namespace of a client, as the kernel reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Principal {
    pub(crate) uid: u32,
    pub(crate) netns: u64,
    standing: Standing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Standing {
    /// Root or the broker's own user, in the broker's network namespace.
    Privileged,
    /// Any other user, in a namespace that only root of the host could have made.
    Stranger,
    /// A user in a namespace that any user could have made.
    Homemade,
}

impl Principal {
    /// Returns the principal of a control connection. `own` is the broker's network namespace.
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

    /// Returns the principal of a client whose namespace, or whose user too, is unknown. It shares
    /// its limits with the namespaces that the user may have made.
    pub(crate) fn unknown(uid: Option<u32>) -> Principal {
        Principal { uid: uid.unwrap_or(u32::MAX), netns: 0, standing: Standing::Homemade }
    }

    /// Returns the account that this principal is charged to. Privileged principals have none.
    pub(crate) fn account(&self) -> Option<Account> {
        match self.standing {
            Standing::Privileged => None,
            Standing::Stranger => Some(Account::Own(*self)),
            Standing::Homemade => Some(Account::Homemade(self.uid)),
        }
    }

    /// Returns whether the principal may see and use everything.
    pub(crate) fn is_privileged(&self) -> bool {
        self.standing == Standing::Privileged
    }
}

/// The principals that a resource is charged to: one, or the two at the ends of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Whose(Principal, Principal);

impl From<Principal> for Whose {
    fn from(one: Principal) -> Whose {
        Whose(one, one)
    }
}

impl Whose {
    /// Returns the two principals, given in any order.
    pub(crate) fn both(one: Principal, other: Principal) -> Whose {
        Whose(one.min(other), one.max(other))
    }

    /// Returns both principals.
    pub(crate) fn each(self) -> [Principal; 2] {
        [self.0, self.1]
    }

    fn is_one(&self) -> bool {
        self.0 == self.1
    }

    /// Returns the accounts to charge. Privileged principals have none.
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

/// A set of resources that share a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Account {
    /// Resources that one principal has used alone. No other principal can exhaust this limit.
    Own(Principal),
    /// Resources that one principal has used together with others.
    WithOthers(Principal),
    /// Resources that these two principals have used together.
    Pair(Whose),
    /// Resources that one uid has used in namespaces that it may have made itself.
    Homemade(u32),
}

/// A limit on a resource, and the amount that each account has of it.
///
/// One eighth is reserved for privileged principals, which may take everything. A stranger may hold
/// a quarter of the rest of the strangers' part alone, and as much together with others. So
/// something always remains for the next one. One uid may hold half of the rest in namespaces that
/// it may have made itself. Of the amount that a principal may hold together with others, one other
/// principal may take half.
///
/// Example: of a limit of 1,024, strangers may have 896. A first one can take 179, which is a
/// quarter of the 717 that are left then. The next can take 143.
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

    /// Takes `amount` if the budget allows it. Returns whether it did.
    pub(crate) fn take(&mut self, whose: impl Into<Whose>, amount: usize) -> bool {
        let whose = whose.into();
        let allowed = self.allows(whose, amount);
        if allowed {
            self.force(whose, amount);
        }
        allowed
    }

    /// Returns whether `amount` may be taken.
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

    /// Takes `amount` without a check.
    pub(crate) fn force(&mut self, whose: impl Into<Whose>, amount: usize) {
        let whose = whose.into();
        self.all += amount;
        self.strangers += if whose.has_stranger() { amount } else { 0 };
        for account in whose.accounts() {
            *self.held.entry(account).or_default() += amount;
        }
    }

    /// Gives back `amount`.
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

    /// Returns the total amount taken.
    pub(crate) fn all(&self) -> usize {
        self.all
    }

    /// Returns the amount that a stranger has taken, alone and with others.
    pub(crate) fn of(&self, one: Principal) -> usize {
        self.held(Account::Own(one)) + self.held(Account::WithOthers(one))
    }

    fn held(&self, account: Account) -> usize {
        self.held.get(&account).copied().unwrap_or(0)
    }
}

/// An amount taken from a budget, which is given back on drop.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Rc<RefCell<Budget>>,
    whose: Whose,
    amount: usize,
}

impl Charge {
    /// Returns an empty charge.
    pub(crate) fn new(budget: &Rc<RefCell<Budget>>, whose: impl Into<Whose>) -> Charge {
        Charge { budget: budget.clone(), whose: whose.into(), amount: 0 }
    }

    /// Changes the amount, if the budget allows it. Returns whether it did.
    pub(crate) fn set(&mut self, amount: usize) -> bool {
        if amount > self.amount {
            return self.more(amount - self.amount);
        }
        self.less(self.amount - amount);
        true
    }

    /// Takes more, if the budget allows it. Returns whether it did.
    pub(crate) fn more(&mut self, amount: usize) -> bool {
        let taken = self.budget.borrow_mut().take(self.whose, amount);
        self.amount += if taken { amount } else { 0 };
        taken
    }

    /// Returns the amount taken.
    pub(crate) fn amount(&self) -> usize {
        self.amount
    }

    /// Gives part of the amount back.
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

    /// Returns another user in the broker's own namespace, or the root user of a container.
    pub(crate) fn stranger(uid: u32, netns: u64) -> Principal {
        Principal { uid, netns, standing: Standing::Stranger }
    }

    fn homemade(uid: u32, netns: u64) -> Principal {
        Principal { uid, netns, standing: Standing::Homemade }
    }

    /// Takes as much as possible. Returns the amount.
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
        // Something is left for the server's next peer, and for the server itself.
        let next = fill(&mut budget, Whose::both(server, stranger(0, 4)));
        assert!(next > 300, "{next}");
        assert!(fill(&mut budget, server) > 1000);
        // A link with a privileged principal is charged to the stranger alone.
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
