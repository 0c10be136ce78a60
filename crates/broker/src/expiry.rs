//! Open offers whose sockets are dead: closed by everybody, or reset. Their process mostly takes them back; one that does not would
//! have them stay as long as it lives. So the kernel is asked about all that are open, slowly.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use shunt_abi::reason::Reason;
use tokio::time::sleep;

use crate::pairing::Offer;
use crate::state::State;

/// Before the kernel is asked about all of them again; twice as long each time that none was dead.
const FIRST: Duration = Duration::from_secs(2);
const LAST: Duration = Duration::from_secs(60);
/// Questions at a time, and the pause between: the clients come first.
const QUESTIONS: usize = 64;
const PAUSE: Duration = Duration::from_millis(100);

/// Looks as long as the broker lives; sleeps while there is no open offer.
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

/// Whether it was open, and dead.
fn refuse_if_dead(state: &mut State, offer: &Offer) -> bool {
    // Answered meanwhile, or taken back.
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
