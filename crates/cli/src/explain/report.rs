//! The answer of `shunt explain`: data for `--json`, and text.

use std::borrow::Cow;
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Serialize;
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::shown::visible;
use shunt_abi::status::Connection;

use crate::obstacle::Obstacle;
use crate::overlay::seen::{self, Seen};
use crate::screen::{Screen, Tone};

/// The whole answer.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// The file, if the question names one.
    pub(super) file: Option<FileReport>,
    /// The processes that the question covers.
    pub(super) processes: Vec<ProcessReport>,
}

/// A program, which need not be running.
#[derive(Debug, Serialize)]
pub(super) struct FileReport {
    pub(super) path: PathBuf,
    /// Whether `shunt run` can put the shim into it.
    pub(super) can_be_entered: bool,
    pub(super) causes: Vec<Cause>,
}

/// A process.
#[derive(Debug, Serialize)]
pub(super) struct ProcessReport {
    pub(super) pid: u32,
    pub(super) uid: u32,
    pub(super) program: String,
    /// Whether the shim is loaded.
    pub(super) under_shunt: bool,
    /// The broker that it uses, if that broker runs.
    pub(super) broker: Option<PathBuf>,
    /// Why all its connections are on TCP, if they are.
    pub(super) causes: Vec<Cause>,
    pub(super) connections: Vec<ConnectionReport>,
}

/// One end of a TCP connection.
#[derive(Debug, Serialize)]
pub(super) struct ConnectionReport {
    pub(super) fd: Option<i32>,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) state: &'static str,
    /// The processes of this host that hold the other end, as far as this user can see them.
    pub(super) peers: Vec<Peer>,
    /// `None`: unknown to the broker, which was restarted.
    pub(super) sends: Option<Transport>,
    pub(super) receives: Option<Transport>,
    /// For a connection between hosts: whether it uses the host network or the overlay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) overlay: Option<seen::NetworkPath>,
    /// Why it, or one of its directions, is on TCP; or why it uses the overlay.
    pub(super) causes: Vec<Cause>,
}

/// A process at the other end.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Peer {
    pub(super) pid: u32,
    pub(super) program: String,
    pub(super) under_shunt: bool,
}

/// One cause, its explanation, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Cause {
    pub(crate) label: Cow<'static, str>,
    pub(crate) explanation: String,
    pub(crate) advice: String,
}

impl From<Reason> for Cause {
    fn from(reason: Reason) -> Cause {
        Cause {
            label: reason.label().into(),
            explanation: reason.explanation().to_owned(),
            advice: reason.advice().to_owned(),
        }
    }
}

impl Cause {
    pub(super) fn of_obstacle(obstacle: &Obstacle, program: &str) -> Cause {
        let mut explanation = obstacle.to_string();
        // The text of an obstacle is a clause. Here it becomes a sentence.
        if let Some(first) = explanation.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        explanation.push('.');
        Cause { label: obstacle.label().into(), explanation, advice: obstacle.advice(program) }
    }

    /// Adapts the explanation to the fact that the other end's program runs under shunt. Its absence
    /// is then not why the end has not been offered. `there` are the causes that were found at the
    /// other end.
    pub(super) fn know_that_the_peer_is_under_shunt(&mut self, there: &[Cause]) {
        if self.label != Reason::PeerNotOffered.label() {
            return;
        }
        let mut labels: Vec<&str> = there.iter().map(|cause| &*cause.label).collect();
        labels.sort_unstable();
        labels.dedup();
        (self.explanation, self.advice) = match labels.is_empty() {
            true => (
                "The other end's program runs under shunt, and has not offered this connection: it has been idle, or is used past shunt."
                    .into(),
                "Ask `shunt explain` with the other end's process id after some use.".into(),
            ),
            false => (
                format!(
                    "The other end's program runs under shunt, but this connection cannot be offered there: {}.",
                    labels.join(", ")
                ),
                format!("Follow the advice for {}; starting the program under shunt again changes nothing.", labels.join(", ")),
            ),
        };
    }

    /// Returns the cause for a reason, with the details that the connection's row contains.
    pub(super) fn of_row(reason: Reason, row: &Connection) -> Cause {
        let mut cause = Cause::from(reason);
        if let (Reason::SocketOption, Some(option)) = (reason, &row.option) {
            let sentence = cause.explanation.trim_end_matches('.');
            cause.explanation = format!("{sentence}: {option}.");
        }
        cause
    }

    /// Returns why a connection between hosts uses the overlay, if it does.
    pub(super) fn of_seen(seen: &Seen) -> Option<Cause> {
        seen.why.clone().map(|why| Cause {
            label: why.reason.into(),
            explanation: why.explanation,
            advice: why.advice,
        })
    }

    /// Returns this cause, worded for the other end.
    pub(super) fn at_peer(self, peer: &Peer) -> Cause {
        let explanation =
            format!("The other end is {} (pid {}). {}", peer.program, peer.pid, self.explanation);
        Cause { explanation, ..self }
    }
}

impl Report {
    /// Keeps only connections with one of these ports at either end. Without a port all are kept.
    pub(super) fn keep_ports(&mut self, ports: &[u16]) {
        let is_kept =
            |one: &ConnectionReport| [one.local, one.remote].iter().any(|end| ports.contains(&end.port()));
        if !ports.is_empty() {
            self.processes.iter_mut().for_each(|process| process.connections.retain(is_kept));
        }
    }

    /// Returns the answer as text.
    pub(super) fn text(&self, screen: &Screen) -> String {
        let mut text = String::new();
        if let Some(file) = &self.file {
            let verdict = if file.can_be_entered { "can run under shunt" } else { "cannot run under shunt" };
            let _ = writeln!(text, "{}: {verdict}", file.path.display());
            add_causes(&mut text, screen, 2, &file.causes);
        }
        for process in &self.processes {
            process.add(&mut text, screen);
        }
        text
    }
}

impl ProcessReport {
    fn add(&self, text: &mut String, screen: &Screen) {
        let name = format!("{}, pid {}", visible(&self.program), self.pid);
        let _ = write!(text, "{}: ", screen.paint(&name, Tone::Title));
        let _ = match (self.under_shunt, &self.broker) {
            (false, _) if self.connections.iter().any(|connection| connection.overlay.is_some()) => {
                writeln!(text, "under a supervisor of the overlay, not under shunt on this host")
            }
            (false, _) => writeln!(text, "not under shunt"),
            (true, None) => writeln!(text, "under shunt, without a broker"),
            (true, Some(path)) => writeln!(text, "under shunt, with the broker at {}", path.display()),
        };
        add_causes(text, screen, 2, &self.causes);
        if self.connections.is_empty() {
            let _ = writeln!(text, "  It has no TCP connection.");
        }
        for group in self.groups() {
            for connection in &group {
                connection.add(text, screen);
            }
            add_causes(text, screen, 4, &group[0].causes);
        }
    }

    /// Groups connections that have equal causes, in the order of the first of each group. So each
    /// cause is printed once.
    fn groups(&self) -> Vec<Vec<&ConnectionReport>> {
        let mut groups: Vec<Vec<&ConnectionReport>> = Vec::new();
        for connection in &self.connections {
            match groups.iter_mut().find(|group| group[0].causes == connection.causes) {
                Some(group) => group.push(connection),
                None => groups.push(vec![connection]),
            }
        }
        groups
    }
}

impl ConnectionReport {
    fn add(&self, text: &mut String, screen: &Screen) {
        let transport = |transport| match transport {
            Some(Transport::Shm) => screen.paint("shared memory", Tone::of(Transport::Shm)),
            Some(Transport::Tcp) => screen.paint("TCP", Tone::of(Transport::Tcp)),
            None => "an unknown transport".to_owned(),
        };
        let transports = match (self.overlay, transport(self.sends), transport(self.receives)) {
            (Some(seen::NetworkPath::Host), ..) => "on the host network".to_owned(),
            (Some(seen::NetworkPath::Overlay), ..) => "on the overlay".to_owned(),
            (None, one, other) if one == other => format!("on {one}"),
            (None, one, other) => format!("sends by {one}, receives by {other}"),
        };
        let peers = self.peers.iter().map(|peer| format!("{} (pid {})", visible(&peer.program), peer.pid));
        let peers = peers.collect::<Vec<_>>().join(", ");
        let with = if peers.is_empty() { String::new() } else { format!(" with {peers}") };
        let state = if self.state == "established" { String::new() } else { format!(", {}", self.state) };
        let _ = writeln!(text, "  {} to {}{with}: {transports}{state}", self.local, self.remote);
    }
}

fn add_causes(text: &mut String, screen: &Screen, indent: usize, causes: &[Cause]) {
    let (spaces, deeper) = (" ".repeat(indent), indent + 2);
    for cause in causes {
        let label = screen.paint(&cause.label, Tone::Warning);
        let explanation = format!(": {}", visible(&cause.explanation));
        let explanation = screen.wrap(&explanation, indent + cause.label.len(), deeper);
        let _ = writeln!(text, "{spaces}{label}{explanation}");
        let advice = format!("What to do: {}", visible(&cause.advice));
        let _ = writeln!(text, "{spaces}  {}", screen.wrap(&advice, deeper, deeper));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_reasons_has_them_all() {
        let page = include_str!("../../../../docs/reasons.md");
        let reasons = Reason::ALL.iter().map(|reason| Cause::from(*reason));
        let path = || "PATH".into();
        let cleaned = Obstacle::EnvironmentCleaned { ancestor: 0, name: "sudo".into() };
        let obstacles = [
            Obstacle::OtherClass,
            Obstacle::OtherMachine,
            Obstacle::Static,
            Obstacle::OtherLibc(path()),
            Obstacle::OldLibc(path()),
            Obstacle::Go,
            Obstacle::OwnCalls("WHY".into()),
            Obstacle::UnseenUse,
            Obstacle::BeforeAttach,
            Obstacle::UntoldUse,
            Obstacle::Setuid,
            Obstacle::Setgid,
            Obstacle::Capabilities,
            Obstacle::NotPreloaded,
            cleaned,
            Obstacle::OutOfReach(path()),
            Obstacle::NotLoaded(path()),
            Obstacle::Ended,
            Obstacle::Kernel,
            Obstacle::Hidden { uid: 0 },
        ];
        let obstacles = obstacles.iter().map(|obstacle| Cause::of_obstacle(obstacle, "PROGRAM"));
        let mut rows = 0;
        for cause in reasons.chain(obstacles) {
            let row = format!("| `{}` | {} | {} |\n", cause.label, cause.explanation, cause.advice);
            assert!(page.contains(&row), "docs/reasons.md lacks:\n{row}");
            rows += 1;
        }
        let listed = page.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(listed, rows, "docs/reasons.md lists something that is not in the code");
    }

    #[test]
    fn the_text_says_who_which_transport_why_and_what_to_do() {
        let peer = Peer { pid: 9, program: "curl".into(), under_shunt: false };
        let cause = Cause::of_obstacle(&Obstacle::Static, "curl").at_peer(&peer);
        let connection = ConnectionReport {
            fd: Some(5),
            local: "127.0.0.1:80".parse().unwrap(),
            remote: "127.0.0.1:4000".parse().unwrap(),
            state: "close_wait",
            peers: vec![peer],
            sends: Some(Transport::Shm),
            receives: Some(Transport::Tcp),
            overlay: None,
            causes: vec![Reason::PeerNotOffered.into(), cause],
        };
        let process = ProcessReport {
            pid: 7,
            uid: 0,
            program: "ng\x1binx".into(),
            under_shunt: true,
            broker: None,
            causes: vec![Reason::NoBroker.into()],
            connections: vec![connection],
        };
        let file = FileReport { path: "/bin/x".into(), can_be_entered: true, causes: Vec::new() };
        let report = Report { file: Some(file), processes: vec![process] };
        assert_eq!(
            report.text(&Screen::default()),
            "/bin/x: can run under shunt\n\
             ng\\u{1b}inx, pid 7: under shunt, without a broker\n  \
               no_broker: No broker could be reached; the shim tries again from time to time.\n    \
                 What to do: If `shunt status` finds no broker, start one: `shunt daemon --detach`.\n  \
               127.0.0.1:80 to 127.0.0.1:4000 with curl (pid 9): sends by shared memory, receives by TCP, close_wait\n    \
                 peer_not_offered: The other end has not been offered: its program is not under shunt, uses it past shunt (as by io_uring), or has been idle.\n      \
                   What to do: Ask `shunt explain` with the name of that program what keeps it out. If it is not under shunt, start it with `shunt run`.\n    \
                 static: The other end is curl (pid 9). It is statically linked.\n      \
                   What to do: Start it directly with `shunt run -- curl`: that enters it, or says what else there is.\n"
        );
    }

    #[test]
    fn connections_with_the_same_causes_have_them_told_once() {
        let connection = |port: u16, reason: Reason| ConnectionReport {
            fd: None,
            local: "127.0.0.1:80".parse().unwrap(),
            remote: ([127, 0, 0, 1], port).into(),
            state: "established",
            peers: Vec::new(),
            sends: Some(Transport::Tcp),
            receives: Some(Transport::Tcp),
            overlay: None,
            causes: vec![reason.into()],
        };
        let connections = vec![
            connection(1, Reason::PeerNotOffered),
            connection(2, Reason::Fork),
            connection(3, Reason::PeerNotOffered),
        ];
        let process = ProcessReport {
            pid: 7,
            uid: 0,
            program: "server".into(),
            under_shunt: true,
            broker: None,
            causes: Vec::new(),
            connections,
        };
        let text = Report { file: None, processes: vec![process] }.text(&Screen::default());
        let told = |word: &str| text.lines().position(|line| line.trim_start().starts_with(word)).unwrap();
        assert_eq!(text.matches("peer_not_offered:").count(), 1, "{text}");
        assert!(told("127.0.0.1:80 to 127.0.0.1:3") < told("peer_not_offered:"), "{text}");
        assert!(told("peer_not_offered:") < told("127.0.0.1:80 to 127.0.0.1:2"), "{text}");
    }
}
