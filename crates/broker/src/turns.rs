//! When what takes long is done for a stranger: a status, or the beginning of a capture. It can take milliseconds, in which nobody else is
//! served, and a stranger can ask without end: so after each the next stranger waits for as long as that took, and the same one nine times as long.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use crate::principal::{Account, Principal};

/// How much longer one waits for its own sake than for that of others.
const OWN_REST: u32 = 9;

/// Who has its turn, and who waits for it. Who came first is first.
#[derive(Debug)]
pub(crate) struct Turns {
    each: RefCell<HashMap<Account, Arc<Semaphore>>>,
    all: Arc<Semaphore>,
}

/// Somebody's turn, which lasts until [`Turn::end`].
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

    /// Waits for the turn of `whose`. The privileged have it at once.
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
        // Those whom nobody waits for, and who do not rest.
        each.retain(|_, turn| Arc::strong_count(turn) > 1);
        each.entry(account).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }
}

impl Turn {
    /// What was to be done has been done. Needs a [`tokio::task::LocalSet`].
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

    /// Whether it is the turn of `whose` within an instant, which is then at an end.
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
            // It waits for twenty milliseconds, where the same one waits for 180.
            drop(turns.next(stranger(8, 1)).await);
            assert!(!has_turn(&turns, greedy).await);
            assert!(has_turn(&turns, stranger(0, 9)).await);
            drop(turns.next(greedy).await);
            drop(turns.next(stranger(9, 1)).await);
            assert_eq!(turns.each.borrow().len(), 1, "nobody else is known any more");
        });
    }
}
