//! Sockets that a process had shut down and shared with children before it ended. Their peers have had the FIN long ago, so when
//! the last child ends, the kernel tells them nothing, although bytes that nobody has read are lost. It is asked, then.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::sleep;

use crate::links::Inherited;
use crate::state::State;

/// Between the first two questions, and the most. In between, as much time again as has passed.
const FIRST: Duration = Duration::from_millis(1);
const LAST: Duration = Duration::from_secs(1);

/// Tells the peer once nobody holds the socket any more. Ends as well if nobody would hear it. Leaves the socket's namespace.
pub(crate) async fn follow(state: Rc<RefCell<State>>, socket: Inherited) {
    let mut pause = FIRST;
    while state.borrow().links.is_heard(socket.place) {
        if !is_held(&mut state.borrow_mut(), &socket) {
            let state = state.borrow();
            state.ring(state.links.say_abandoned(socket.place));
            break;
        }
        sleep(pause).await;
        pause = (2 * pause).min(LAST);
    }
    state.borrow_mut().namespaces.leave(socket.key.netns);
}

/// Whether a process has it, as far as can be told.
fn is_held(state: &mut State, socket: &Inherited) -> bool {
    match state.namespaces.find(socket.key, socket.cookie) {
        Ok(found) => found.is_some_and(|found| found.is_held),
        Err(error) => {
            tracing::debug!(%error, "sock_diag does not answer");
            true
        }
    }
}
