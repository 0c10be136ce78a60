//! Ends open offers whose sockets are dead: closed by all processes, or reset. Usually the process
//! withdraws such an offer. If it does not, the offer would stay for as long as the process lives.
//! So the broker queries the kernel about all open offers, at a low rate.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use shunt_abi::reason::Reason;
use tokio::time::sleep;

use crate::pairing::Offer;
use crate::state::State;

/// The delay before all open offers are queried again. It doubles each time that none was dead.
const FIRST: Duration = Duration::from_secs(2);
const LAST: Duration = Duration::from_secs(60);
/// Number of queries in a row, and the pause after them, in which clients are served.
const QUESTIONS: usize = 64;
const PAUSE: Duration = Duration::from_millis(100);

/// Queries open offers as long as the broker runs. Sleeps while there are none.
pub(crate) async fn expire(state: Rc<RefCell<State>>) {
    let opened = state.borrow().opened.clone();
    loop {
        opened.notified().await;
        let mut rest = FIRST;
        loop {
            sleep(rest).await;
            let open: Vec<Offer> = state.borrow().offers.all().copied().collect();
            if open.is_empty() {
                break;
            }
            let mut dead = 0;
            for some in open.chunks(QUESTIONS) {
                dead += some.iter().filter(|offer| refuse_if_dead(&mut state.borrow_mut(), offer)).count();
                sleep(PAUSE).await;
            }
            rest = if dead > 0 { FIRST } else { (2 * rest).min(LAST) };
        }
    }
}

/// Refuses an offer if it is open and its socket is dead. Returns whether it did.
fn refuse_if_dead(state: &mut State, offer: &Offer) -> bool {
    // The offer was paired, refused or withdrawn meanwhile.
    if !state.offers.contains(offer) {
        return false;
    }
    let is_dead = match state.namespaces.find(offer.key, offer.cookie) {
        Ok(found) => !found.is_some_and(|found| found.is_held),
        Err(error) => {
            tracing::debug!(%error, "sock_diag does not answer");
            false
        }
    };
    if is_dead {
        state.refuse_open(offer, Reason::Stale);
    }
    is_dead
}
