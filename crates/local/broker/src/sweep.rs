//! Periodically drops links that have been unused for a while, and retires those that hold much
//! unused memory.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use tokio::time::sleep;

use crate::links::LINGER;
use crate::state::State;

/// Checks the links as long as the broker runs. Sleeps while no link holds unused memory.
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
