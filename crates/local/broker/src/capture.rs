//! Captures: which clients read the memory of which links (docs/adr/0030). While a link is
//! captured, each of its slots is used at most once and the rings are not reset. So the bytes that
//! a capture sees of one connection never belong to another.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use shunt_abi::address::to_octets;
use shunt_abi::control::{Capturing, SeenEnd, SeenLink, SeenPair, SeenUnlink};
use shunt_abi::geometry::Side;
use shunt_sys::process_access::{self, Home, Present};
use shunt_sys::seqpacket::{self, Credentials};
use shunt_sys::{pidfd, view};

use crate::links::{CaptureEvent, CaptureView, Grant, LinkId};
use crate::outbox::{Backlog, Descriptor, Outbox};
use crate::pairing::ProcessId;
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
    /// Revokes the rights of a reader whose process could not obtain them now. It may have changed
    /// its user or its namespaces. Returns the links that it has been shown and may read no more.
    fn review(&mut self) -> Vec<LinkId> {
        if self.has_rights() {
            return Vec::new();
        }
        let is_new = !matches!(self.rights, Rights::Nothing);
        self.rights = Rights::Nothing;
        self.pending.clear();
        // A reader that has ended reads nothing more.
        if !is_new || seqpacket::has_hung_up(self.outbox.socket()) {
            return Vec::new();
        }
        tracing::info!(pid = self.pid, "a reader has lost its rights: it is shown nothing more");
        let shown: Vec<_> = self.told.drain().collect();
        for link in &shown {
            self.outbox.push(SeenUnlink { link: *link }.into(), None);
        }
        shown
    }

    /// Returns whether the process could obtain the rights of this capture now.
    fn has_rights(&self) -> bool {
        let is_user =
            |uid| process_access::has_thread(self.pid, |present: Present| present.user == uid) == Some(true);
        let is_still = match self.rights {
            Rights::All => is_user(0) && process_access::may_look_into_all(self.pid),
            Rights::Own(principal, home) => {
                is_user(principal.uid) && process_access::home(self.pid) == Some(home)
            }
            Rights::Nothing => false,
        };
        // Checked last: if the process has ended, the pid may belong to another process by now.
        is_still && self.life.as_ref().is_some_and(process_access::is_alive)
    }

    /// Removes a link that this capture may read no more. Returns whether it had been shown.
    fn remove(&mut self, link: LinkId) -> bool {
        self.pending.retain(|pending| pending.link != link);
        let was_shown = self.told.remove(&link);
        if was_shown {
            self.outbox.push(SeenUnlink { link }.into(), None);
        }
        was_shown
    }

    fn covers(&self, link: LinkId) -> bool {
        self.told.contains(&link) || self.pending.iter().any(|pending| pending.link == link)
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
        self.unsee();
    }

    /// Unmarks the links that no capture reads any more.
    fn unsee(&mut self) {
        let all = &self.captures.all;
        self.links.unsee(|link| all.iter().any(|capture| capture.covers(link)));
        if all.is_empty() {
            self.links.take_capture_events();
        }
        self.note_released();
    }

    /// Checks that each capture may still read the links between two processes. A link that a
    /// capture must not read any more is closed, because the reader keeps its memory: it gets no
    /// new connections, and those that it has are asked to fall back to TCP.
    pub(crate) fn review_captures(&mut self, ends: [ProcessId; 2]) {
        if self.captures.all.is_empty() {
            return;
        }
        let mut captures = std::mem::take(&mut self.captures.all);
        let mut homes = Homes::default();
        let links = self.links.between(ends);
        let mut closed = Vec::new();
        for capture in &mut captures {
            closed.extend(capture.review());
            for link in &links {
                if capture.covers(*link)
                    && !self.may_see(capture.rights, *link, &mut homes)
                    && capture.remove(*link)
                {
                    closed.push(*link);
                }
            }
        }
        self.captures.all = captures;
        self.close_links(&closed);
    }

    /// Closes links whose readers must not read them any more, and unmarks them.
    fn close_links(&mut self, links: &[LinkId]) {
        if links.is_empty() {
            return;
        }
        links.iter().for_each(|link| self.links.close(*link));
        self.unsee();
    }

    /// Reports a new link, on which no slot is granted yet.
    pub(crate) fn tell_new_link(&mut self, link: LinkId) {
        let mut captures = std::mem::take(&mut self.captures.all);
        let mut closed = Vec::new();
        for capture in &mut captures {
            closed.extend(capture.review());
            if self.may_see(capture.rights, link, &mut Homes::default()) {
                self.links.see(link);
                capture.pending.push_back(Pending { link, under_way: 0 });
                capture.outbox.nudge();
            }
        }
        self.captures.all = captures;
        self.close_links(&closed);
    }

    /// Reports a granted slot to captures, before the two ends are notified. Their rights have been
    /// [reviewed](Self::review_captures) before the grant.
    pub(crate) fn tell_grant(&mut self, grant: &Grant) {
        for capture in &mut self.captures.all {
            if capture.told.contains(&grant.link)
                && let Some(view) = self.links.capture_view(grant.link, grant.conn)
            {
                capture.outbox.push(pair(grant.link, &view, true).into(), None);
            }
        }
    }

    /// Sends links to a client for as long as it reads its messages.
    pub(crate) fn tell_links(&mut self, id: CaptureId) {
        let mut captures = std::mem::take(&mut self.captures.all);
        let mut closed = Vec::new();
        if let Some(capture) = captures.iter_mut().find(|capture| capture.id == id) {
            if !capture.pending.is_empty() {
                closed = capture.review();
            }
            while capture.outbox.backlog() == Backlog::None
                && let Some(pending) = capture.pending.pop_front()
            {
                self.tell_link(capture, pending);
            }
        }
        self.captures.all = captures;
        self.close_links(&closed);
    }

    fn tell_link(&self, capture: &mut Capture, Pending { link, under_way }: Pending) {
        let (Some(ends), Some((memfd, capture_views))) =
            (self.links.ends(link), self.links.capture_views(link))
        else {
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
        for view in capture_views {
            let is_fresh = under_way & 1 << view.conn == 0;
            capture.outbox.push(pair(link, &view, is_fresh).into(), None);
        }
    }

    /// Reports to captures which connections and links have ended since the last call.
    pub(crate) fn report_capture_events(&mut self) {
        if self.captures.all.is_empty() {
            return;
        }
        for event in self.links.take_capture_events() {
            for capture in &mut self.captures.all {
                match event {
                    CaptureEvent::Ended(link, conn) if capture.told.contains(&link) => {
                        capture.outbox.push(SeenEnd { link, conn, pad: 0 }.into(), None);
                    }
                    CaptureEvent::Dropped(link) if capture.told.remove(&link) => {
                        capture.outbox.push(SeenUnlink { link }.into(), None);
                    }
                    CaptureEvent::Ended(..) | CaptureEvent::Dropped(_) => {}
                }
            }
        }
    }
}

fn pair(link: LinkId, view: &CaptureView, is_fresh: bool) -> SeenPair {
    // The first byte that one side receives is the first byte that the other side sends.
    let first = [view.first[Side::B as usize], view.first[Side::A as usize]];
    SeenPair {
        link,
        conn: view.conn,
        fresh: is_fresh.into(),
        cookies: view.cookies,
        addresses: view.keys.map(|key| [key.local, key.remote].map(|address| to_octets(address.ip()))),
        ports: view.keys.map(|key| [key.local.port(), key.remote.port()]),
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
