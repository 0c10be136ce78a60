//! Captures: which clients read the memory of which links (docs/adr/0030). While a link is
//! captured, each of its slots is used at most once and the rings are not reset. So the bytes that
//! a capture sees of one connection never belong to another.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use shunt_abi::address::to_octets;
use shunt_abi::control::{Capturing, SeenEnd, SeenLink, SeenPair, SeenUnlink};
use shunt_abi::geometry::Side;
use shunt_sys::process_access::{self, Home};
use shunt_sys::seqpacket::Credentials;
use shunt_sys::{pidfd, view};

use crate::disposal::Descriptor;
use crate::links::{Grant, LinkId, News, Sight};
use crate::outbox::{Backlog, Outbox};
use crate::principal::Principal;
use crate::state::State;

pub(crate) type CaptureId = u64;

/// A registry of all captures.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    all: Vec<Capture>,
    next: CaptureId,
}

#[derive(Debug)]
struct Capture {
    id: CaptureId,
    outbox: Rc<Outbox>,
    rights: Rights,
    /// The process id of the capturing process.
    pid: u32,
    life: Option<OwnedFd>,
    /// Links that have been reported to it.
    told: HashSet<LinkId>,
    /// Links that are still to be reported, one at a time, since each message holds a descriptor
    /// until it is received.
    pending: VecDeque<Pending>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    link: LinkId,
    /// Connections that existed before the link was captured, one bit each.
    under_way: u64,
}

/// Which connections a capture may read.
#[derive(Clone, Copy, Debug)]
enum Rights {
    /// All: the reader is root of the host, which may inspect every process anyway.
    All,
    /// Connections between two programs of this principal that have always been this principal's
    /// and live in the same namespaces as the reader.
    Own(Principal, Home),
    /// None.
    Nothing,
}

/// A cache of the namespaces and the user of each process, queried once per process.
#[derive(Debug, Default)]
struct Homes(HashMap<u32, Option<(Home, u32)>>);

impl Homes {
    fn of(&mut self, pid: u32) -> Option<(Home, u32)> {
        *self.0.entry(pid).or_insert_with(|| process_access::home(pid).zip(process_access::owner(pid)))
    }
}

impl Rights {
    /// Returns the rights of the process behind a control connection. `pidfd` refers to that
    /// process.
    fn of(credentials: Credentials, principal: Principal, pidfd: Option<&OwnedFd>) -> Rights {
        let Some(pidfd) = pidfd else { return Rights::Nothing };
        let Some(home) = process_access::home(credentials.pid) else { return Rights::Nothing };
        let is_root = principal.is_privileged() && credentials.uid == 0;
        let is_all = is_root
            && process_access::own_home() == Some(home)
            && process_access::may_look_into_all(credentials.pid);
        // Checked last: if the process has ended, the pid may belong to another process by now.
        match process_access::is_alive(pidfd) {
            true if is_all => Rights::All,
            true => Rights::Own(principal, home),
            false => Rights::Nothing,
        }
    }
}

impl Capture {
    /// Revokes the rights of a reader of everything if its process could not obtain them now. The
    /// process may have changed its user.
    fn review(&mut self) {
        let is_root = || process_access::has_thread(self.pid, |present| present.user == 0) == Some(true);
        let is_still = || {
            is_root()
                && process_access::may_look_into_all(self.pid)
                && self.life.as_ref().is_some_and(process_access::is_alive)
        };
        if matches!(self.rights, Rights::All) && !is_still() {
            tracing::info!(pid = self.pid, "it is root's no more: it is shown nothing that is new");
            self.rights = Rights::Nothing;
            self.pending.clear();
        }
    }
}

impl State {
    /// Registers a client that captures. [`State::tell_links`] sends it the existing links.
    pub(crate) fn capture(
        &mut self,
        credentials: Credentials,
        principal: Principal,
        outbox: &Rc<Outbox>,
    ) -> CaptureId {
        let life = pidfd::of_peer(outbox.socket(), credentials.pid);
        let rights = Rights::of(credentials, principal, life.as_ref());
        let of_all = matches!(rights, Rights::All);
        let (pid, uid) = (credentials.pid, credentials.uid);
        tracing::info!(pid, uid, of_all, "somebody reads along");
        outbox.push(Capturing { of_all: of_all.into(), pad: 0 }.into(), None);
        let mut homes = Homes::default();
        let visible = self.links.ids().into_iter().filter(|link| self.may_see(rights, *link, &mut homes));
        let visible: Vec<_> = visible.collect();
        let see = |link| Pending { link, under_way: self.links.see(link) };
        let pending = visible.into_iter().map(see).collect();
        self.captures.next += 1;
        let id = self.captures.next;
        let told = HashSet::new();
        self.captures.all.push(Capture { id, outbox: outbox.clone(), rights, pid, life, told, pending });
        id
    }

    fn may_see(&self, rights: Rights, link: LinkId, homes: &mut Homes) -> bool {
        match rights {
            Rights::All => true,
            Rights::Nothing => false,
            Rights::Own(principal, home) => {
                let ends = self.links.ends(link).into_iter().flatten();
                ends.map(|end| self.processes.get(&end)).all(|process| {
                    process.is_some_and(|process| {
                        process.principal == principal
                            && homes.of(process.credentials.pid) == Some((home, principal.uid))
                    })
                })
            }
        }
    }

    /// Ends a capture.
    pub(crate) fn end_capture(&mut self, id: CaptureId) {
        self.captures.all.retain(|capture| capture.id != id);
        if self.captures.all.is_empty() {
            self.links.unsee();
            self.note_released();
        }
    }

    /// Reports a new link, on which no slot is granted yet.
    pub(crate) fn tell_new_link(&mut self, link: LinkId) {
        let mut captures = std::mem::take(&mut self.captures.all);
        for capture in &mut captures {
            capture.review();
            if self.may_see(capture.rights, link, &mut Homes::default()) {
                self.links.see(link);
                capture.pending.push_back(Pending { link, under_way: 0 });
                capture.outbox.nudge();
            }
        }
        self.captures.all = captures;
    }

    /// Reports a granted slot to captures, before the two ends are notified.
    pub(crate) fn tell_grant(&mut self, grant: &Grant) {
        for capture in &mut self.captures.all {
            capture.review();
            if !matches!(capture.rights, Rights::Nothing)
                && capture.told.contains(&grant.link)
                && let Some(sight) = self.links.sight(grant.link, grant.conn)
            {
                capture.outbox.push(pair(grant.link, &sight, true).into(), None);
            }
        }
    }

    /// Sends links to a client for as long as it reads its messages.
    pub(crate) fn tell_links(&mut self, id: CaptureId) {
        let mut captures = std::mem::take(&mut self.captures.all);
        if let Some(capture) = captures.iter_mut().find(|capture| capture.id == id) {
            if !capture.pending.is_empty() {
                capture.review();
            }
            while capture.outbox.backlog() == Backlog::None
                && let Some(pending) = capture.pending.pop_front()
            {
                self.tell_link(capture, pending);
            }
        }
        self.captures.all = captures;
    }

    fn tell_link(&self, capture: &mut Capture, Pending { link, under_way }: Pending) {
        let (Some(ends), Some((memfd, sights))) = (self.links.ends(link), self.links.sights(link)) else {
            return;
        };
        let memfd: Rc<dyn Descriptor> = match view::for_reading(&**memfd) {
            Ok(memfd) => Rc::new(memfd),
            Err(error) => return tracing::warn!(%error, "a link cannot be opened for reading"),
        };
        let processes = ends.map(|end| self.processes.get(&end));
        let seen = SeenLink {
            link,
            ring_bytes: self.links.ring_bytes() as u64,
            pids: processes.map(|process| process.map_or(0, |process| process.credentials.pid)),
            programs: processes.map(|process| process.map_or([0; 32], |process| padded(&process.program))),
        };
        capture.told.insert(link);
        capture.outbox.push(seen.into(), Some(memfd));
        for sight in sights {
            let is_fresh = under_way & 1 << sight.conn == 0;
            capture.outbox.push(pair(link, &sight, is_fresh).into(), None);
        }
    }

    /// Reports to captures which connections and links have ended since the last call.
    pub(crate) fn tell_news(&mut self) {
        if self.captures.all.is_empty() {
            return;
        }
        for news in self.links.take_news() {
            for capture in &mut self.captures.all {
                match news {
                    News::Ended(link, conn) if capture.told.contains(&link) => {
                        capture.outbox.push(SeenEnd { link, conn, pad: 0 }.into(), None);
                    }
                    News::Dropped(link) if capture.told.remove(&link) => {
                        capture.outbox.push(SeenUnlink { link }.into(), None);
                    }
                    News::Ended(..) | News::Dropped(_) => {}
                }
            }
        }
    }
}

fn pair(link: LinkId, sight: &Sight, is_fresh: bool) -> SeenPair {
    // The first byte that one side receives is the first byte that the other side sends.
    let first = [sight.first[Side::B as usize], sight.first[Side::A as usize]];
    SeenPair {
        link,
        conn: sight.conn,
        fresh: is_fresh.into(),
        cookies: sight.cookies,
        addresses: sight.keys.map(|key| [key.local, key.remote].map(|address| to_octets(address.ip()))),
        ports: sight.keys.map(|key| [key.local.port(), key.remote.port()]),
        first: first.map(|first| first.unwrap_or(0)),
        known: first.iter().all(Option::is_some).into(),
    }
}

/// Returns a program name padded as in a hello message.
fn padded(program: &str) -> [u8; 32] {
    let mut name = [0; 32];
    name.iter_mut().zip(program.bytes()).for_each(|(to, from)| *to = from);
    name
}
