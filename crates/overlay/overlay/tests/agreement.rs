//! A model of the last steps between two routers (docs/overlay-protocol.md, "Agreement"). It
//! explores every order of the steps, where each process may be stopped before its next step for
//! any time. In the end both ends have changed over, or neither has.

use std::collections::HashSet;

/// The two rules by which the ends agree. Without either rule the ends can disagree.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// The server's router lets no segment in before it checks for Commit.
    is_deaf_first: bool,
    /// The client's supervisor waits for the acknowledgement of Commit, unless it sent Commit
    /// early.
    waits_to_be_heard: bool,
}

/// The client's supervisor, which has the host connection and the Commit to be sent on it.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Client {
    Ready,
    /// The supervisor has found the connection open.
    Open,
    /// The supervisor has sent Commit.
    Said,
    Host,
    Overlay,
}

/// The server's router, after its promise.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Server {
    Promised,
    /// The router is to withdraw its promise, and is about to check for Commit.
    Looks,
    /// The router has checked, and Commit was not there.
    Resets,
    Host,
    Overlay,
}

/// The time since the call began.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Time {
    Soon,
    Later,
    /// The promise may be withdrawn.
    Lapsed,
}

/// A segment, which may be under way for any time.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Segment {
    None,
    UnderWay,
    Arrived,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
struct State {
    client: Client,
    server: Server,
    time: Time,
    commit: Segment,
    /// Commit was sent early.
    was_soon: bool,
    /// The acknowledgement of Commit by the server's kernel.
    acknowledgement: Segment,
    /// The reset that the server's router sends.
    reset: Segment,
    /// The FIN of a client's end that closes the connection without Commit.
    end: Segment,
}

impl State {
    const FIRST: State = State {
        client: Client::Ready,
        server: Server::Promised,
        time: Time::Soon,
        commit: Segment::None,
        was_soon: false,
        acknowledgement: Segment::None,
        reset: Segment::None,
        end: Segment::None,
    };

    /// Returns all states that can follow.
    fn next(self, rules: Rules) -> Vec<State> {
        let segments = self.segments(rules);
        [self.clock(), segments, self.client(rules), self.server()].concat()
    }

    fn clock(self) -> Vec<State> {
        match self.time {
            Time::Soon => vec![State { time: Time::Later, ..self }],
            // The only assumption about the network: a segment that is sent half a second before a
            // promise lapses has arrived by then.
            Time::Later if self.was_soon && self.commit == Segment::UnderWay => vec![],
            Time::Later => vec![State { time: Time::Lapsed, ..self }],
            Time::Lapsed => vec![],
        }
    }

    fn segments(self, rules: Rules) -> Vec<State> {
        use Segment::{Arrived, UnderWay};
        let hears = match self.server {
            Server::Promised => true,
            Server::Looks | Server::Resets => !rules.is_deaf_first,
            Server::Host | Server::Overlay => false,
        };
        let mut next = Vec::new();
        if self.commit == UnderWay && hears {
            next.push(State { commit: Arrived, acknowledgement: UnderWay, ..self });
        }
        if self.acknowledgement == UnderWay {
            next.push(State { acknowledgement: Arrived, ..self });
        }
        if self.reset == UnderWay {
            next.push(State { reset: Arrived, ..self });
        }
        if self.end == UnderWay {
            next.push(State { end: Arrived, ..self });
        }
        next
    }

    fn client(self, rules: Rules) -> Vec<State> {
        let stays = State { client: Client::Overlay, end: Segment::UnderWay, ..self };
        let takes = State { client: Client::Host, ..self };
        let is_reset = self.reset == Segment::Arrived;
        let is_soon = self.time == Time::Soon;
        match self.client {
            // The client's program or router may be slower than the other end waits.
            Client::Ready if is_reset => vec![stays],
            Client::Ready => vec![stays, State { client: Client::Open, ..self }],
            Client::Open if is_reset => vec![stays],
            Client::Open => {
                let said = State { client: Client::Said, commit: Segment::UnderWay, ..self };
                vec![State { was_soon: is_soon, ..said }]
            }
            Client::Said if !rules.waits_to_be_heard => vec![takes],
            // The supervisor reads its clock after it has sent Commit.
            Client::Said if is_soon || self.acknowledgement == Segment::Arrived => vec![takes],
            Client::Said if is_reset => vec![stays],
            Client::Said | Client::Host | Client::Overlay => vec![],
        }
    }

    fn server(self) -> Vec<State> {
        let is = |server| State { server, ..self };
        let has_commit = self.commit == Segment::Arrived;
        match self.server {
            Server::Promised => {
                let mut next = Vec::new();
                if has_commit {
                    next.push(is(Server::Host));
                } else if self.end == Segment::Arrived {
                    next.push(is(Server::Overlay));
                }
                if self.time == Time::Lapsed {
                    next.push(is(Server::Looks));
                }
                next
            }
            Server::Looks if has_commit => vec![is(Server::Host)],
            Server::Looks => vec![is(Server::Resets)],
            Server::Resets => vec![State { server: Server::Overlay, reset: Segment::UnderWay, ..self }],
            Server::Host | Server::Overlay => vec![],
        }
    }

    /// Returns `true` if one end's program has the host connection, and the other's the overlay
    /// connection.
    fn is_torn(self) -> bool {
        let ends = (self.client, self.server);
        matches!(ends, (Client::Host, Server::Overlay) | (Client::Overlay, Server::Host))
    }
}

/// Returns all reachable states.
fn explore(rules: Rules) -> HashSet<State> {
    let mut seen = HashSet::from([State::FIRST]);
    let mut left = vec![State::FIRST];
    while let Some(state) = left.pop() {
        left.extend(state.next(rules).into_iter().filter(|next| seen.insert(*next)));
    }
    seen
}

#[test]
fn both_ends_change_over_or_neither_does() {
    let rules = Rules { is_deaf_first: true, waits_to_be_heard: true };
    let states = explore(rules);
    let torn: Vec<_> = states.iter().filter(|state| state.is_torn()).collect();
    assert!(torn.is_empty(), "{torn:#?}");
    // Every run ends, and both outcomes occur.
    let ended = states.iter().filter(|state| state.next(rules).is_empty());
    let ends: HashSet<_> = ended.map(|state| (state.client, state.server)).collect();
    assert_eq!(ends, [(Client::Host, Server::Host), (Client::Overlay, Server::Overlay)].into());
}

#[test]
fn neither_rule_is_enough_by_itself() {
    for (is_deaf_first, waits_to_be_heard) in [(false, false), (false, true), (true, false)] {
        let rules = Rules { is_deaf_first, waits_to_be_heard };
        assert!(explore(rules).iter().any(|state| state.is_torn()), "{rules:?}");
    }
}
