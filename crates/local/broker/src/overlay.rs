//! The overlay's policy for connections between containers of this host. The router writes it to a
//! file (docs/adr/0034). The broker checks the file before it makes a pair across network
//! namespaces, and periodically for existing pairs.
//!
//! In doubt a connection stays on TCP. A file that cannot be read, belongs to another user or has
//! an unknown version forbids all such connections. Without a file there is no overlay on this
//! host. If the router ends, its last policy stays in force.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use rustix::fs::OFlags;
use serde::Deserialize;
use shunt_abi::local_policy::{LocalFlow, LocalPolicy, VERSION};
use shunt_abi::reason::Reason;
use thiserror::Error;
use tokio::time::sleep;

use crate::links::Held;
use crate::pairing::Offer;
use crate::state::State;

/// The interval at which a new policy is applied to existing pairs.
const TICK: Duration = Duration::from_millis(250);
/// Maximum size of a policy in bytes, far more than any needs.
const LONGEST: u64 = 16 << 20;

/// The policy that the router published last.
#[derive(Debug)]
pub(crate) struct Overlay {
    file: PathBuf,
    known: Known,
    policy: Published,
    /// Set until existing pairs have been checked against the policy.
    is_new: bool,
}

/// The content of the policy file.
#[derive(Debug)]
enum Published {
    /// There is no file, so there is no overlay here.
    Nothing,
    Policy(LocalPolicy),
    /// The file cannot be used as a policy.
    Unclear,
}

/// The identity of the file that was read. A router replaces the whole file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Known {
    #[default]
    None,
    File {
        place: (u64, u64),
        changed: (i64, i64),
        len: u64,
    },
    /// The file exists, but its metadata cannot be read.
    Hidden,
}

/// Why a file cannot be used as a policy.
#[derive(Debug, Error)]
enum Unclear {
    #[error("{0}")]
    Read(#[from] std::io::Error),
    #[error("it belongs to the user {0}, or others can write to it")]
    Owner(u32),
    #[error("{0}")]
    Malformed(#[from] serde_json::Error),
    #[error("its version is {0}, and this broker reads {VERSION}: start the older of router and broker anew")]
    Version(u32),
}

impl Overlay {
    pub(crate) fn new(file: PathBuf) -> Overlay {
        Overlay { file, known: Known::None, policy: Published::Nothing, is_new: false }
    }

    /// Reads the policy again if its file has changed. Costs one system call if not.
    pub(crate) fn renew(&mut self) {
        let known = Known::of(&self.file);
        if known == self.known {
            return;
        }
        self.known = known;
        self.is_new = true;
        self.policy = match (known, read(&self.file)) {
            (Known::None, _) => Published::Nothing,
            (_, Ok(policy)) => Published::Policy(policy),
            (_, Err(error)) => {
                let file = self.file.display();
                tracing::warn!(%error, "{file}: no connection between network namespaces takes shared memory");
                Published::Unclear
            }
        };
    }

    /// Returns why a pair must not be made or must end, or `None` if it is allowed.
    pub(crate) fn against(&self, one: &Held, other: &Held) -> Option<Reason> {
        if one.key.netns == other.key.netns {
            return None;
        }
        match &self.policy {
            Published::Nothing => None,
            Published::Unclear => Some(Reason::OverlayUnclear),
            Published::Policy(policy) => {
                let may_be = flows(one, other).is_some_and(|flows| policy.allows(&flows));
                (!may_be).then_some(Reason::OverlayPolicy)
            }
        }
    }

    fn take_new(&mut self) -> bool {
        std::mem::take(&mut self.is_new)
    }
}

/// Returns the connection as each of its ends sees it, if it is known which of them called
/// `connect`.
fn flows(one: &Held, other: &Held) -> Option<[LocalFlow; 2]> {
    let (opener, acceptor) = match one.origin?.has_opened(other.origin?)? {
        true => (one.key, other.key),
        false => (other.key, one.key),
    };
    Some([
        LocalFlow { source: opener.local, destination: opener.remote },
        LocalFlow { source: acceptor.remote, destination: acceptor.local },
    ])
}

impl Known {
    fn of(path: &Path) -> Known {
        match std::fs::metadata(path) {
            Ok(file) => Known::File {
                place: (file.dev(), file.ino()),
                changed: (file.ctime(), file.ctime_nsec()),
                len: file.len(),
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Known::None,
            Err(_) => Known::Hidden,
        }
    }
}

fn read(path: &Path) -> Result<LocalPolicy, Unclear> {
    // Prevents the open from blocking on a FIFO at this path.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    let owner = about.uid();
    let is_trusted = owner == 0 || owner == rustix::process::geteuid().as_raw();
    if !is_trusted || about.mode() & 0o022 != 0 {
        return Err(Unclear::Owner(owner));
    }
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text)?;
    let Version { version } = serde_json::from_str(&text)?;
    match version {
        VERSION => Ok(serde_json::from_str(&text)?),
        other => Err(Unclear::Version(other)),
    }
}

/// The part of the file that every version has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl State {
    /// Returns why two offers that are one connection must not be paired.
    pub(crate) fn forbids(&mut self, one: &Offer, other: &Offer) -> Option<Reason> {
        self.overlay.renew();
        self.overlay.against(&Held::of(one), &Held::of(other))
    }

    /// Ends existing pairs that a changed policy forbids.
    fn enforce(&mut self) {
        self.overlay.renew();
        if !self.overlay.take_new() {
            return;
        }
        let mut ended = 0;
        for [one, other] in self.links.held() {
            if let Some(reason) = self.overlay.against(&one, &other) {
                ended += 1;
                self.end_pair([&one, &other], reason);
            }
        }
        if ended > 0 {
            tracing::info!(ended, "connections go back to TCP: the overlay's policy has changed");
        }
    }
}

/// Checks the policy periodically while there are programs in other network namespaces. Runs as
/// long as the broker.
pub(crate) async fn watch(state: Rc<RefCell<State>>) {
    loop {
        sleep(TICK).await;
        let mut state = state.borrow_mut();
        if state.namespaces.is_foreign() {
            state.enforce();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::Key;
    use shunt_kernel::sequence::Origin;
    use std::os::unix::fs::PermissionsExt;

    /// Returns both ends of a connection between two namespaces. The first one called `connect`.
    fn ends() -> (Held, Held) {
        let held = |netns, local: &str, remote: &str, sent, received| Held {
            process: netns,
            ticket: netns,
            key: Key { netns, local: local.parse().unwrap(), remote: remote.parse().unwrap() },
            origin: Some(Origin { sent, received }),
        };
        (
            held(1, "10.50.1.1:40000", "10.50.1.2:80", 100, 500),
            held(2, "10.50.1.2:80", "10.50.1.1:40000", 500, 101),
        )
    }

    fn published(directory: &Path, rule: &str) -> PathBuf {
        let path = directory.join("overlay.policy");
        let beside = directory.join("new");
        std::fs::write(
            &beside,
            format!(
                r#"{{"version":3,"prefixes":["10.50.0.0/16"],"hosts":[],"known":{{}},"rules":[{rule}],"egress":[],"ingress":[],"shared-by-default":true}}"#
            ),
        )
        .unwrap();
        std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(beside, &path).unwrap();
        path
    }

    #[test]
    fn a_policy_is_asked_by_who_has_called_connect() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = ends();
        let rule = r#"{"from":{"prefixes":["10.50.1.1/32"]},"to":{"prefixes":["10.50.1.2/32"]},"ports":{"numbers":[[80,80]]},"shared":false}"#;
        let mut overlay = Overlay::new(published(directory.path(), rule));
        assert_eq!(overlay.against(&one, &other), None, "nothing has been read");
        overlay.renew();
        assert!(overlay.take_new() && !overlay.take_new());
        for (one, other) in [(&one, &other), (&other, &one)] {
            assert_eq!(overlay.against(one, other), Some(Reason::OverlayPolicy));
        }
        // The rule applies neither to a connection that the other end opened, nor within one
        // namespace.
        let turned = |held: &Held| Held { origin: ends().1.origin, ..*held };
        let turned_other = Held { origin: ends().0.origin, ..other };
        assert_eq!(overlay.against(&turned(&one), &turned_other), None);
        let same = Held { key: Key { netns: one.key.netns, ..other.key }, ..other };
        assert_eq!(overlay.against(&one, &same), None);
        // It is not known which end called `connect`.
        let unknown = Held { origin: None, ..one };
        assert_eq!(overlay.against(&unknown, &other), Some(Reason::OverlayPolicy));
    }

    #[test]
    fn another_file_is_read_and_in_doubt_nothing_is_shared() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = ends();
        let path = directory.path().join("overlay.policy");
        let mut overlay = Overlay::new(path.clone());
        let mut against = || {
            overlay.renew();
            overlay.against(&one, &other)
        };
        assert_eq!(against(), None, "no overlay");
        published(directory.path(), "");
        assert_eq!(against(), None);
        published(directory.path(), r#"{"shared":false}"#);
        assert_eq!(against(), Some(Reason::OverlayPolicy));
        let doubtful: [&dyn Fn(); 4] = [
            &|| std::fs::write(&path, "{").unwrap(),
            &|| std::fs::write(&path, r#"{"version":4,"more":1}"#).unwrap(),
            &|| {
                published(directory.path(), "");
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o620)).unwrap();
            },
            &|| {
                std::fs::remove_file(&path).unwrap();
                std::fs::create_dir(&path).unwrap();
            },
        ];
        for make in doubtful {
            make();
            assert_eq!(against(), Some(Reason::OverlayUnclear));
        }
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(against(), None);
    }
}
