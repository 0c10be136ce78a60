//! The subscriptions of connections to channels and patterns.

use std::collections::{BTreeSet, HashMap};

use super::glob;

type Name = Box<[u8]>;

/// All subscriptions.
#[derive(Debug, Default)]
pub(super) struct Registry {
    channels: HashMap<Name, Vec<u64>>,
    patterns: HashMap<Name, Vec<u64>>,
    clients: HashMap<u64, Client>,
}

/// The subscriptions of a connection.
#[derive(Debug, Default)]
struct Client {
    channels: BTreeSet<Name>,
    patterns: BTreeSet<Name>,
    /// Bytes of all names.
    size: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Channel,
    Pattern,
}

/// The most bytes of the names that a connection has subscribed to, each with 64 more.
const MAX_NAMES: usize = 4 << 20;

impl Registry {
    pub(super) fn channels(&self) -> usize {
        self.channels.len()
    }

    pub(super) fn patterns(&self) -> usize {
        self.patterns.len()
    }

    pub(super) fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Returns the number of subscriptions of a connection.
    pub(super) fn count(&self, handle: u64) -> usize {
        self.clients.get(&handle).map_or(0, |client| client.channels.len() + client.patterns.len())
    }

    /// Subscribes a connection. Returns false if it has too many subscriptions.
    pub(super) fn subscribe(&mut self, handle: u64, kind: Kind, name: &[u8]) -> bool {
        let client = self.clients.entry(handle).or_default();
        let names = client.names(kind);
        if names.contains(name) {
            return true;
        }
        if client.size + name.len() + 64 > MAX_NAMES {
            return false;
        }
        client.size += name.len() + 64;
        client.names(kind).insert(name.into());
        self.all(kind).entry(name.into()).or_default().push(handle);
        true
    }

    pub(super) fn unsubscribe(&mut self, handle: u64, kind: Kind, name: &[u8]) {
        let Some(client) = self.clients.get_mut(&handle) else { return };
        if !client.names(kind).remove(name) {
            return;
        }
        client.size -= name.len() + 64;
        if client.channels.is_empty() && client.patterns.is_empty() {
            self.clients.remove(&handle);
        }
        let all = self.all(kind);
        let Some(handles) = all.get_mut(name) else { return };
        handles.retain(|one| *one != handle);
        if handles.is_empty() {
            all.remove(name);
        }
    }

    /// Returns the names of one kind that a connection has subscribed to.
    pub(super) fn names(&self, handle: u64, kind: Kind) -> Vec<Name> {
        let Some(client) = self.clients.get(&handle) else { return Vec::new() };
        let names = if kind == Kind::Channel { &client.channels } else { &client.patterns };
        names.iter().cloned().collect()
    }

    /// Ends all subscriptions of a connection.
    pub(super) fn forget(&mut self, handle: u64) {
        for kind in [Kind::Channel, Kind::Pattern] {
            for name in self.names(handle, kind) {
                self.unsubscribe(handle, kind, &name);
            }
        }
    }

    /// Returns the subscribers of a channel.
    pub(super) fn subscribers(&self, channel: &[u8]) -> &[u64] {
        self.channels.get(channel).map_or(&[], Vec::as_slice)
    }

    /// Returns the patterns that match a channel, with their subscribers.
    pub(super) fn matching(&self, channel: &[u8]) -> impl Iterator<Item = (&[u8], &[u64])> {
        let matching = self.patterns.iter().filter(move |(pattern, _)| glob::matches(pattern, channel));
        matching.map(|(pattern, handles)| (&**pattern, handles.as_slice()))
    }

    /// Returns the channels with subscribers that a pattern matches.
    pub(super) fn active(&self, pattern: Option<&[u8]>) -> Vec<&[u8]> {
        let names = self.channels.keys().map(|name| &**name);
        names.filter(|name| pattern.is_none_or(|pattern| glob::matches(pattern, name))).collect()
    }

    fn all(&mut self, kind: Kind) -> &mut HashMap<Name, Vec<u64>> {
        if kind == Kind::Channel { &mut self.channels } else { &mut self.patterns }
    }
}

impl Client {
    fn names(&mut self, kind: Kind) -> &mut BTreeSet<Name> {
        if kind == Kind::Channel { &mut self.channels } else { &mut self.patterns }
    }
}
