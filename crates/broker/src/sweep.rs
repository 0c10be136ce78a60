//! Drops links that nobody has used for a while.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use tokio::time::sleep;

use crate::links::LINGER;
use crate::state::State;

/// Sweeps as long as the broker lives; sleeps while no link is empty.
pub(crate) async fn sweep(state: Rc<RefCell<State>>) {
    let emptied = state.borrow().emptied.clone();
    loop {
        emptied.notified().await;
        while state.borrow().links.has_emptied() {
            sleep(LINGER).await;
            state.borrow_mut().drop_empty_links(Instant::now());
        }
    }
}
