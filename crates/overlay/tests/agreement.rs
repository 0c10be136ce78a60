//! The end of a conversation between two routers, as docs/overlay-protocol.md has it under *Agreement*, in every order in which its steps can
//! be taken: whoever takes one may be stopped before the next, for as long as it likes. Both ends change over, or neither does.

use std::collections::HashSet;

/// What is done so that the ends agree. Without either of the two they do not always.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// The server's router lets nothing more in before it looks whether Commit is there.
    is_deaf_first: bool,
    /// The client's supervisor waits until Commit has got there, unless it was said soon.
    waits_to_be_heard: bool,
}

/// The client's supervisor, which has the host connection and what it is to say on it.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Client {
    Ready,
    /// It has looked: the connection is open.
    Open,
    /// It has said Commit.
    Said,
    Host,
    Overlay,
}

/// The server's router, which has promised.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Server {
    Promised,
    /// It is to take its promise back, and is about to look for Commit.
    Looks,
    /// It has looked, and Commit was not there.
    Resets,
    Host,
    Overlay,
}

/// How long it is since the call began.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Time {
    Soon,
    Later,
    /// The promise may be taken back.
    Lapsed,
}

/// A segment, which may be under way for as long as it likes.
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
    /// Commit was said soon.
    was_soon: bool,
    /// The server's kernel has Commit, and says so.
    acknowledgement: Segment,
    /// By the server's router.
    reset: Segment,
    /// The client's end has closed the connection without Commit.
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

    /// All that can be next.
    fn next(self, rules: Rules) -> Vec<State> {
        let segments = self.segments(rules);
        [self.clock(), segments, self.client(rules), self.server()].concat()
    }

    fn clock(self) -> Vec<State> {
        match self.time {
            Time::Soon => vec![State { time: Time::Later, ..self }],
            // All that is supposed of the network: what is said half a second before a promise lapses is there by then.
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
            // Its program, or its router, may be slower than anybody waits.
            Client::Ready if is_reset => vec![stays],
            Client::Ready => vec![stays, State { client: Client::Open, ..self }],
            Client::Open if is_reset => vec![stays],
            Client::Open => {
                let said = State { client: Client::Said, commit: Segment::UnderWay, ..self };
                vec![State { was_soon: is_soon, ..said }]
            }
            Client::Said if !rules.waits_to_be_heard => vec![takes],
            // It looks at its clock when it has spoken.
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

    /// The program of one end has one connection, and that of the other another.
    fn is_torn(self) -> bool {
        let ends = (self.client, self.server);
        matches!(ends, (Client::Host, Server::Overlay) | (Client::Overlay, Server::Host))
    }
}

/// All that can come to be.
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
    // Each comes to an end, and to either.
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
