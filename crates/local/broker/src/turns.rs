//! Schedules requests of strangers that take long: a status, or the start of a capture. Such a
//! request can occupy the broker's only thread for milliseconds, and a stranger can repeat it
//! without end. So after a request that took time t, other strangers wait for t, and the stranger
//! that made it waits for 9t.
//!
//! Example: a status for user 7 takes 20 ms. Then user 8 waits for 20 ms more, and user 7 waits for
//! 180 ms until its next turn.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use crate::principal::{Account, Principal};

/// The factor by which a stranger waits longer for its own next turn than others do.
const OWN_REST: u32 = 9;

/// A queue of turns, first come, first served.
#[derive(Debug)]
pub(crate) struct Turns {
    each: RefCell<HashMap<Account, Arc<Semaphore>>>,
    all: Arc<Semaphore>,
}

/// A turn. It lasts until [`Turn::end`].
#[derive(Debug)]
pub(crate) struct Turn {
    began: Instant,
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    own: OwnedSemaphorePermit,
    all: OwnedSemaphorePermit,
}

impl Turns {
    pub(crate) fn new() -> Turns {
        Turns { each: RefCell::default(), all: Arc::new(Semaphore::new(1)) }
    }

    /// Waits for a turn of `whose`. Privileged principals do not wait.
    pub(crate) async fn next(&self, whose: Principal) -> Turn {
        let held = match whose.account() {
            None => None,
            Some(account) => self.wait(account).await,
        };
        Turn { began: Instant::now(), held }
    }

    async fn wait(&self, account: Account) -> Option<Held> {
        let own = self.of(account).acquire_owned().await.ok()?;
        let all = self.all.clone().acquire_owned().await.ok()?;
        Some(Held { own, all })
    }

    fn of(&self, account: Account) -> Arc<Semaphore> {
        let mut each = self.each.borrow_mut();
        if let Some(known) = each.get(&account) {
            return known.clone();
        }
        // Removes accounts that neither wait nor rest.
        each.retain(|_, turn| Arc::strong_count(turn) > 1);
        each.entry(account).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }
}

impl Turn {
    /// Ends the turn, and starts the rest. Needs a [`tokio::task::LocalSet`].
    pub(crate) fn end(self) {
        let Some(Held { own, all }) = self.held else { return };
        let took = self.began.elapsed();
        spawn_local(async move {
            sleep(took).await;
            drop(all);
            sleep(took * (OWN_REST - 1)).await;
            drop(own);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::principal::tests::{ROOT, stranger};
    use std::time::Duration;
    use tokio::task::LocalSet;
    use tokio::time::timeout;

    /// Returns whether `whose` gets a turn without waiting. A turn that it gets ends immediately.
    async fn has_turn(turns: &Turns, whose: Principal) -> bool {
        timeout(Duration::ZERO, turns.next(whose)).await.is_ok()
    }

    #[test]
    fn whoever_has_just_had_a_turn_waits_longest() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let turns = Turns::new();
            let greedy = stranger(7, 1);
            let turn = turns.next(greedy).await;
            assert!(has_turn(&turns, ROOT).await);
            assert!(!has_turn(&turns, stranger(8, 1)).await, "while another's is made");
            std::thread::sleep(Duration::from_millis(20));
            turn.end();
            // Another stranger waits for 20 ms, and the same one for 180 ms.
            drop(turns.next(stranger(8, 1)).await);
            assert!(!has_turn(&turns, greedy).await);
            assert!(has_turn(&turns, stranger(0, 9)).await);
            drop(turns.next(greedy).await);
            drop(turns.next(stranger(9, 1)).await);
            assert_eq!(turns.each.borrow().len(), 1, "nobody else is known any more");
        });
    }
}
