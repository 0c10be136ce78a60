//! Schedules requests of strangers that take long: a status, or the start of a capture. Such a
//! request can occupy the broker's only thread for milliseconds, and a stranger can repeat it
//! without end. So after a request that took time t, other strangers wait for t, and the stranger
//! that made it waits for 9t.
//!
//! Example: a status for user 7 takes 20 ms. Then user 8 waits for 20 ms more, and user 7 waits for
//! 180 ms until its next permit.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use crate::principal::{Account, Principal};

/// The factor by which a stranger waits longer for its own next permit than others do.
const OWN_REST: u32 = 9;

/// A queue of requests, first come, first served.
#[derive(Debug)]
pub(crate) struct FairLimiter {
    each: RefCell<HashMap<Account, Arc<Semaphore>>>,
    all: Arc<Semaphore>,
}

/// A permit. It lasts until [`Permit::end`].
#[derive(Debug)]
pub(crate) struct Permit {
    began: Instant,
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    own: OwnedSemaphorePermit,
    all: OwnedSemaphorePermit,
}

impl FairLimiter {
    pub(crate) fn new() -> FairLimiter {
        FairLimiter { each: RefCell::default(), all: Arc::new(Semaphore::new(1)) }
    }

    /// Waits for a permit of `whose`. Privileged principals do not wait.
    pub(crate) async fn acquire(&self, whose: Principal) -> Permit {
        let held = match whose.account() {
            None => None,
            Some(account) => self.wait(account).await,
        };
        Permit { began: Instant::now(), held }
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
        each.retain(|_, permit| Arc::strong_count(permit) > 1);
        each.entry(account).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }
}

impl Permit {
    /// Ends the permit, and starts the rest. Needs a [`tokio::task::LocalSet`].
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

    /// Returns whether `whose` gets a permit without waiting. A permit that it gets ends immediately.
    async fn has_permit(limiter: &FairLimiter, whose: Principal) -> bool {
        timeout(Duration::ZERO, limiter.acquire(whose)).await.is_ok()
    }

    #[test]
    fn last_to_have_a_permit_waits_longest() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let limiter = FairLimiter::new();
            let greedy = stranger(7, 1);
            let permit = limiter.acquire(greedy).await;
            assert!(has_permit(&limiter, ROOT).await);
            assert!(!has_permit(&limiter, stranger(8, 1)).await, "while another's is made");
            std::thread::sleep(Duration::from_millis(20));
            permit.end();
            // Another stranger waits for 20 ms, and the same one for 180 ms.
            drop(limiter.acquire(stranger(8, 1)).await);
            assert!(!has_permit(&limiter, greedy).await);
            assert!(has_permit(&limiter, stranger(0, 9)).await);
            drop(limiter.acquire(greedy).await);
            drop(limiter.acquire(stranger(9, 1)).await);
            assert_eq!(limiter.each.borrow().len(), 1, "nobody else is known any more");
        });
    }
}
