//! Keeps the path at which programs look for the broker. The socket file or its directory may be
//! removed while the broker runs: systemd-logind removes /run/user/UID with the last session of a
//! user, and recreates it later. Then the broker would serve only its existing clients, and a
//! second broker would be started for later ones. No connection between the two groups would be
//! paired.
//!
//! So the broker checks its path once a second.
//!
//! - Its own socket is there: the place is [`Held`](Place::Held).
//! - Anything else is there, and the broker can listen there again: the place is
//!   [`Held`](Place::Held) by a new socket, and the clients notice nothing.
//! - A broker answers there that programs would trust ([`guard`]): the place is
//!   [`Taken`](Place::Taken). This broker ends, and its clients connect to the other.
//! - The directory cannot be made, or another file is in the way: the place is
//!   [`Lost`](Place::Lost). This broker serves its existing clients and keeps checking.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use shunt_sys::{guard, seqpacket};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::config::Mode;
use crate::listener::{ListenError, Listener};

/// The interval between checks.
const PERIOD: Duration = Duration::from_secs(1);

/// The owner of the broker's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// This broker.
    Held,
    /// No broker.
    Lost,
    /// Another broker. This is the final state.
    Taken,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The socket that this broker made last.
    Own,
    /// Something else, which the broker has replaced with a new socket.
    Anew,
    /// The socket of another broker.
    Rival,
    /// Something else, which the broker cannot replace.
    Obstacle,
}

impl Place {
    /// Returns the state after a check.
    fn after(self, found: Found) -> Place {
        match (self, found) {
            (Place::Taken, _) | (_, Found::Rival) => Place::Taken,
            (_, Found::Own | Found::Anew) => Place::Held,
            (_, Found::Obstacle) => Place::Lost,
        }
    }
}

/// The action that follows a check.
pub(crate) enum Step {
    /// None.
    Stay,
    /// Accept clients on this socket from now on.
    Move(OwnedFd),
    /// Stop.
    End,
}

/// Checks and restores the broker's path.
pub(crate) struct Keeper {
    listener: Listener,
    path: PathBuf,
    mode: Mode,
    place: Place,
    looks: Interval,
}

impl Keeper {
    /// Returns a keeper for the path of `listener`, which already listens.
    pub(crate) fn new(listener: Listener, path: PathBuf, mode: Mode) -> Keeper {
        let mut looks = interval_at(Instant::now() + PERIOD, PERIOD);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Keeper { listener, path, mode, place: Place::Held, looks }
    }

    /// Waits until the next check is due. Never completes if the service manager made the socket,
    /// since it then keeps the file too.
    pub(crate) async fn due(&mut self) {
        if !self.listener.is_made_here() {
            std::future::pending::<()>().await;
        }
        self.looks.tick().await;
    }

    /// Checks the path.
    pub(crate) fn look(&mut self) -> Step {
        let (found, socket, why) = self.find();
        let before = self.place;
        self.place = before.after(found);
        let path = self.path.display();
        match (before, self.place) {
            (Place::Held, Place::Lost) => {
                tracing::warn!(socket = %path, why, "the socket is gone, and cannot be made again: new programs stay on TCP");
            }
            (_, Place::Held) if found == Found::Anew => {
                tracing::warn!(socket = %path, "the socket was gone: listens again");
            }
            (_, Place::Taken) => {
                tracing::warn!(socket = %path, "another broker has the place of this one, which ends");
            }
            _ => {}
        }
        match (self.place, socket) {
            (Place::Taken, _) => Step::End,
            (_, Some(socket)) => Step::Move(socket),
            _ => Step::Stay,
        }
    }

    fn find(&mut self) -> (Found, Option<OwnedFd>, String) {
        if self.listener.has_its_place() {
            return (Found::Own, None, String::new());
        }
        match self.listener.listen_again(self.mode) {
            Ok(socket) => (Found::Anew, socket, String::new()),
            Err(ListenError::AlreadyRunning { .. }) if self.is_answered_by_ours() => {
                (Found::Rival, None, String::new())
            }
            Err(error) => (Found::Obstacle, None, error.to_string()),
        }
    }

    /// Returns whether the broker that listens at the path is one that this broker's programs would
    /// trust. No other listener can make this broker stop. A broker that has just started may not
    /// answer yet.
    fn is_answered_by_ours(&self) -> bool {
        let answering = seqpacket::connect(self.path.as_os_str().as_encoded_bytes());
        answering.is_ok_and(|socket| guard::is_trusted(&self.path, &socket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries all sequences of four checks.
    #[test]
    fn the_last_look_decides_until_another_broker_is_found() {
        const FOUND: [Found; 4] = [Found::Own, Found::Anew, Found::Rival, Found::Obstacle];
        for sequence in 0..4_usize.pow(4) {
            let (mut place, mut has_rival) = (Place::Held, false);
            for look in 0..4 {
                let found = FOUND[sequence / 4_usize.pow(look) % 4];
                has_rival |= found == Found::Rival;
                place = place.after(found);
                let expected = match found {
                    _ if has_rival => Place::Taken,
                    Found::Obstacle => Place::Lost,
                    _ => Place::Held,
                };
                assert_eq!(place, expected, "after {found:?}");
            }
        }
    }
}
