//! The path at which programs look for the broker. The file there, or its directory, may be taken away while the broker runs:
//! systemd-logind removes /run/user/UID with the last session of a user, and makes it again. The broker would serve whom it has, another
//! would be started for those who come later, and no connection between the two would be paired.
//!
//! So the broker looks once a second what is at its path.
//!
//! | it finds | and | so the place is |
//! | --- | --- | --- |
//! | its own socket | | [`Held`](Place::Held) |
//! | anything else | it can listen there again | [`Held`](Place::Held), by a new socket; its clients notice nothing |
//! | anything else | a broker answers there that programs would trust ([`guard`]) | [`Taken`](Place::Taken): it ends, and its clients come to that one |
//! | anything else | neither: the directory cannot be made, or a file is in the way | [`Lost`](Place::Lost): it serves whom it has, and goes on looking |

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use shunt_sys::{guard, seqpacket};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::config::Mode;
use crate::listener::{ListenError, Listener};

/// How often the broker looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Who is at the broker's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// This broker.
    Held,
    /// No broker.
    Lost,
    /// Another one. This is the last state.
    Taken,
}

/// What a look at the path has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The socket that this broker has made last.
    Own,
    /// Something else, in whose place it listens now.
    Anew,
    /// Another broker.
    Rival,
    /// Something else, which it cannot replace.
    Obstacle,
}

impl Place {
    /// Returns the state after a look.
    fn after(self, found: Found) -> Place {
        match (self, found) {
            (Place::Taken, _) | (_, Found::Rival) => Place::Taken,
            (_, Found::Own | Found::Anew) => Place::Held,
            (_, Found::Obstacle) => Place::Lost,
        }
    }
}

/// What the broker is to do after a look.
pub(crate) enum Step {
    /// Nothing.
    Stay,
    /// To accept by this socket from now on.
    Move(OwnedFd),
    /// To end.
    End,
}

/// Keeps the broker's place.
pub(crate) struct Keeper {
    listener: Listener,
    path: PathBuf,
    mode: Mode,
    place: Place,
    looks: Interval,
}

impl Keeper {
    /// Returns a keeper of the place of `listener`, which listens.
    pub(crate) fn new(listener: Listener, path: PathBuf, mode: Mode) -> Keeper {
        let mut looks = interval_at(Instant::now() + PERIOD, PERIOD);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Keeper { listener, path, mode, place: Place::Held, looks }
    }

    /// Waits until it is time to look. Never, if somebody else has made the socket and keeps its file.
    pub(crate) async fn due(&mut self) {
        if !self.listener.is_made_here() {
            std::future::pending::<()>().await;
        }
        self.looks.tick().await;
    }

    /// Looks at the path.
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

    /// Whether the programs of this broker would take who listens at the path for theirs: nobody else makes it end. One that has only
    /// just begun does not answer yet.
    fn is_answered_by_ours(&self) -> bool {
        let answering = seqpacket::connect(self.path.as_os_str().as_encoded_bytes());
        answering.is_ok_and(|socket| guard::is_trusted(&self.path, &socket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All sequences of four looks.
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
