//! Maps a key to a backend, as the file of backends or the command line configures it.

use serde::{Deserialize, Serialize};

use crate::hash::{Placement, Scheme};
use crate::service::Key;

/// The rule that maps a key to a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hashing {
    /// A numeric key, or the hash of a key of bytes, modulo the number of backends.
    #[default]
    Modulo,
    /// The continuum of libketama: when backends are added or removed, only their keys move.
    Ketama,
    /// The service names the backend. Keys of numbers or bytes have no backend.
    Service,
}

/// A hashing rule together with the backends that it distributes keys over.
#[derive(Debug)]
pub(crate) struct Chooser {
    pub(crate) hashing: Hashing,
    pub(crate) placement: Placement,
}

impl Chooser {
    pub(crate) fn new(hashing: Hashing, backends: &[(String, u32)]) -> Chooser {
        let scheme = if hashing == Hashing::Ketama { Scheme::Ketama } else { Scheme::Modulo };
        let placement =
            Placement::new(scheme, backends.iter().map(|(name, weight)| (name.as_str(), *weight)));
        Chooser { hashing, placement }
    }

    /// Returns the index of the message's backend, counted from 0.
    pub(crate) fn choose(&self, key: &Key, message: &[u8]) -> Option<usize> {
        if self.hashing == Hashing::Service && !matches!(key, Key::Backend(_)) {
            return None;
        }
        self.placement.backend(message, key)
    }
}
