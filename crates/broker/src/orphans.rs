//! Sockets that a process has left as it ended, of which TCP may tell the peer too little: one that it had shut down and shared with
//! children, since the peer has had the FIN long ago; and one with bytes of the peer's unread in a lane, since the FIN waits
//! behind all that the peer has no room for. TCP would reset either once nobody holds it. So the kernel is asked.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::spawn_local;
use tokio::time::sleep;

use crate::links::Orphan;
use crate::state::State;

/// Between the first two questions, and the most. In between, as much time again as has passed.
const FIRST: Duration = Duration::from_millis(1);
const LAST: Duration = Duration::from_secs(1);

/// Tells the peer once nobody holds the socket any more, which mostly is so by now.
pub(crate) fn follow(state: &Rc<RefCell<State>>, orphan: Orphan) {
    if is_over(&mut state.borrow_mut(), &orphan) {
        return;
    }
    let state = state.clone();
    spawn_local(async move {
        let mut pause = FIRST;
        sleep(pause).await;
        while !is_over(&mut state.borrow_mut(), &orphan) {
            sleep(pause).await;
            pause = (2 * pause).min(LAST);
        }
    });
}

/// Whether there is nothing more to ask: the peer has been told, or nobody would hear it. Leaves the socket's namespace then.
fn is_over(state: &mut State, orphan: &Orphan) -> bool {
    let is_heard = state.links.is_heard(orphan.place);
    if is_heard && is_held(state, orphan) {
        return false;
    }
    if is_heard {
        state.ring(state.links.say_abandoned(orphan.place));
    }
    state.links.end_following(orphan.place);
    state.namespaces.leave(orphan.key.netns);
    true
}

/// Whether a process has it, as far as can be told.
fn is_held(state: &mut State, orphan: &Orphan) -> bool {
    match state.namespaces.find(orphan.key, orphan.cookie) {
        Ok(found) => found.is_some_and(|found| found.is_held),
        Err(error) => {
            tracing::debug!(%error, "sock_diag does not answer");
            true
        }
    }
}
