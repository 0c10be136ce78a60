//! Drops links that nobody has used for a while, and retires those that hold much memory for
//! nothing.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use tokio::time::sleep;

use crate::links::LINGER;
use crate::state::State;

/// Sweeps as long as the broker lives; sleeps while no link holds memory that nobody uses.
pub(crate) async fn sweep(state: Rc<RefCell<State>>) {
    let emptied = state.borrow().emptied.clone();
    loop {
        emptied.notified().await;
        while state.borrow().links.has_idle_memory() {
            sleep(LINGER).await;
            state.borrow_mut().give_memory_back(Instant::now());
        }
    }
}
