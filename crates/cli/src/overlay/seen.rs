//! The connections of supervised programs on this host, as the overlay's router reports them.
//! `shunt status` and `shunt explain` use them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde::{Deserialize, Serialize};
use shunt_abi::shown::visible;
use shunt_overlay::Request;

use crate::table::{Column, left, render};

/// The router's answer.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct View {
    /// The host's name.
    pub(crate) name: String,
    pub(crate) connections: Vec<Seen>,
    /// The number of connections that the answer leaves out.
    pub(crate) left_out: usize,
    /// The containers of this host that have no supervisor. An older router does not list them.
    #[serde(default)]
    pub(crate) unserved: AllUnserved,
}

/// The containers without a supervisor.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AllUnserved {
    pub(crate) containers: Vec<Unserved>,
    pub(crate) left_out: usize,
}

impl AllUnserved {
    /// Returns how many there are, including those that are not listed.
    pub(crate) fn count(&self) -> usize {
        self.containers.len() + self.left_out
    }

    /// Returns why they are not served, each cause once.
    pub(crate) fn causes(&self) -> impl Iterator<Item = &Why> {
        let causes: BTreeMap<&str, &Why> =
            self.containers.iter().map(|it| (it.why.reason.as_str(), &it.why)).collect();
        causes.into_values()
    }
}

/// A container on the overlay without a supervisor.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Unserved {
    pub(crate) address: IpAddr,
    /// One of its processes.
    pub(crate) pid: u32,
    pub(crate) program: String,
    #[serde(flatten)]
    pub(crate) why: Why,
}

/// One end of a connection.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Seen {
    /// Which end it is: `client` if it connected, `server` if it accepted.
    pub(crate) end: String,
    #[serde(alias = "road")]
    pub(crate) path: NetworkPath,
    /// The addresses that its program uses.
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// The addresses on the host network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<Place>,
    /// Why it uses the overlay.
    #[serde(flatten)]
    pub(crate) why: Option<Why>,
}

/// The path of a connection between hosts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum NetworkPath {
    Host,
    Overlay,
}

impl NetworkPath {
    pub(crate) fn label(self) -> &'static str {
        match self {
            NetworkPath::Host => "host",
            NetworkPath::Overlay => "overlay",
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Place {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Why {
    pub(crate) reason: String,
    pub(crate) explanation: String,
    pub(crate) advice: String,
}

const COLUMNS: [Column; 5] =
    [left("END", 0), left("LOCAL", 0), left("REMOTE", 0), left("PATH", 0), left("WHY OVERLAY", 0)];

impl View {
    /// Asks the router. Returns `None` if no router answers, or if it refuses this user.
    pub(crate) fn ask(control: &Path) -> Option<View> {
        serde_json::from_value(shunt_overlay::ask(control, &Request::Connections).ok()?).ok()
    }

    /// Returns the connection of a socket, found by the addresses that the kernel shows for the
    /// socket.
    pub(crate) fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<&Seen> {
        self.connections.iter().find(|seen| {
            let place = seen.host.unwrap_or(Place { local: seen.local, remote: seen.remote });
            (place.local, place.remote) == (local, remote)
        })
    }

    /// Returns the connections as text.
    pub(crate) fn text(&self) -> String {
        let on = |path: NetworkPath| self.connections.iter().filter(|seen| seen.path == path).count();
        let mut text = format!(
            "overlay, router {}: {} on the host network, {} on the overlay\n",
            self.name,
            on(NetworkPath::Host),
            on(NetworkPath::Overlay)
        );
        if !self.connections.is_empty() {
            self.list(&mut text);
        }
        if !self.unserved.containers.is_empty() {
            let _ = writeln!(text, "\n{} containers on the overlay are not served:", self.unserved.count());
            for Unserved { address, program, pid, why } in &self.unserved.containers {
                let _ = writeln!(text, "{address}  {}  {pid}  {}", visible(program), why.reason);
            }
            for Why { reason, explanation, advice } in self.unserved.causes() {
                let _ = writeln!(text, "{reason}: {explanation} {advice}");
            }
        }
        text
    }

    /// Appends the connections, one on a line.
    fn list(&self, text: &mut String) {
        let why = |seen: &Seen| seen.why.as_ref().map(|why| why.reason.clone()).unwrap_or_default();
        let row = |seen: &Seen| {
            let (local, remote) = (seen.local.to_string(), seen.remote.to_string());
            vec![seen.end.clone(), local, remote, seen.path.label().to_owned(), why(seen)]
        };
        let mut rows: Vec<_> = self.connections.iter().map(row).collect();
        rows.sort();
        let _ = write!(text, "\n{}", render(&COLUMNS, &rows));
        if self.left_out > 0 {
            let _ = writeln!(text, "{} more", self.left_out);
        }
        let reasons: BTreeMap<&str, &str> = self
            .connections
            .iter()
            .filter_map(|seen| seen.why.as_ref())
            .map(|why| (why.reason.as_str(), why.explanation.as_str()))
            .collect();
        if !reasons.is_empty() {
            text.push('\n');
        }
        reasons.into_iter().for_each(|(reason, explanation)| {
            let _ = writeln!(text, "{reason}: {explanation}");
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn containers_without_a_supervisor_are_listed() {
        let view: View = serde_json::from_value(json!({
            "name": "one", "left-out": 0, "connections": [],
            "unserved": { "left-out": 1, "containers": [
                { "address": "10.50.1.2", "pid": 7, "program": "nginx", "reason": "not-supervised",
                  "explanation": "No supervisor was started with it.", "advice": "Start it again." },
                { "address": "10.50.1.3", "pid": 8, "program": "redis", "reason": "not-known",
                  "explanation": "Its supervisor has another router.", "advice": "Look." },
                { "address": "10.50.1.4", "pid": 9, "program": "nginx", "reason": "not-supervised",
                  "explanation": "No supervisor was started with it.", "advice": "Start it again." },
            ] },
        }))
        .unwrap();
        assert_eq!(
            view.text(),
            "overlay, router one: 0 on the host network, 0 on the overlay\n\
             \n\
             4 containers on the overlay are not served:\n\
             10.50.1.2  nginx  7  not-supervised\n\
             10.50.1.3  redis  8  not-known\n\
             10.50.1.4  nginx  9  not-supervised\n\
             not-known: Its supervisor has another router. Look.\n\
             not-supervised: No supervisor was started with it. Start it again.\n"
        );
    }

    #[test]
    fn a_connection_is_one_line_and_its_reason_is_explained_once() {
        let stays = |port: u16| {
            json!({
                "end": "client", "path": "overlay", "local": format!("10.50.1.2:{port}"),
                "remote": "10.50.2.2:80", "reason": "used", "explanation": "Bytes had been sent.", "advice": "Look first.",
            })
        };
        let view: View = serde_json::from_value(json!({
            "name": "one",
            "left-out": 0,
            "connections": [
                stays(2), stays(1),
                { "end": "server", "path": "host", "local": "10.50.1.2:80", "remote": "10.50.2.2:9",
                  "host": { "local": "192.168.0.1:7450", "remote": "192.168.0.2:4000" } },
            ],
        }))
        .unwrap();
        assert_eq!(
            view.text(),
            "overlay, router one: 1 on the host network, 2 on the overlay\n\
             \n\
             END     LOCAL         REMOTE        PATH     WHY OVERLAY\n\
             client  10.50.1.2:1   10.50.2.2:80  overlay  used\n\
             client  10.50.1.2:2   10.50.2.2:80  overlay  used\n\
             server  10.50.1.2:80  10.50.2.2:9   host\n\
             \n\
             used: Bytes had been sent.\n"
        );
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let found = view.find(at("192.168.0.1:7450"), at("192.168.0.2:4000")).unwrap();
        assert_eq!((found.local, found.path), (at("10.50.1.2:80"), NetworkPath::Host));
        assert!(
            view.find(at("10.50.1.2:80"), at("10.50.2.2:9")).is_none(),
            "its program's names are not its socket's"
        );
        assert_eq!(
            view.find(at("10.50.1.2:2"), at("10.50.2.2:80")).unwrap().why.as_ref().unwrap().reason,
            "used"
        );
    }
}
