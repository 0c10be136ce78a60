//! Who reads along, and what of (docs/adr/0030). A link that somebody reads along has each of its places used once, and its rings left
//! as they are: what is seen of a connection is of no other.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use shunt_abi::address::to_octets;
use shunt_abi::control::{Capturing, SeenEnd, SeenLink, SeenPair, SeenUnlink};
use shunt_abi::geometry::Side;
use shunt_sys::seqpacket::Credentials;
use shunt_sys::standing::{self, Home};
use shunt_sys::{pidfd, view};

use crate::disposal::Descriptor;
use crate::links::{Grant, LinkId, News, Sight};
use crate::outbox::{Backlog, Outbox};
use crate::principal::Principal;
use crate::state::State;

pub(crate) type CaptureId = u64;

/// All who read along.
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
    /// The process that reads along.
    pid: u32,
    life: Option<OwnedFd>,
    /// Links that it knows.
    told: HashSet<LinkId>,
    /// Links that it is yet to be told of, one at a time: each is a descriptor until it has been received.
    pending: VecDeque<Pending>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    link: LinkId,
    /// Connections that there had been before it was read along, a bit for each.
    under_way: u64,
}

/// What somebody may read along.
#[derive(Clone, Copy, Debug)]
enum Rights {
    /// Everything: root of the host, who may look into every program anyway.
    All,
    /// Connections whose both ends are programs of this principal's, which have never been anybody else's and live where the reader
    /// does.
    Own(Principal, Home),
    /// Nothing.
    Nothing,
}

/// Where processes live and whose they are, each asked once.
#[derive(Debug, Default)]
struct Homes(HashMap<u32, Option<(Home, u32)>>);

impl Homes {
    fn of(&mut self, pid: u32) -> Option<(Home, u32)> {
        *self.0.entry(pid).or_insert_with(|| standing::home(pid).zip(standing::owner(pid)))
    }
}

impl Rights {
    /// Those of the process behind a control connection, of which this is the pidfd.
    fn of(credentials: Credentials, principal: Principal, pidfd: Option<&OwnedFd>) -> Rights {
        let Some(pidfd) = pidfd else { return Rights::Nothing };
        let Some(home) = standing::home(credentials.pid) else { return Rights::Nothing };
        let is_root = principal.is_privileged() && credentials.uid == 0;
        let is_all =
            is_root && standing::own_home() == Some(home) && standing::may_look_into_all(credentials.pid);
        // Else the number may have become another's.
        match standing::is_alive(pidfd) {
            true if is_all => Rights::All,
            true => Rights::Own(principal, home),
            false => Rights::Nothing,
        }
    }
}

impl Capture {
    /// Takes its rights from one that reads everything along, if it could not begin to any more: it may have become another user's.
    fn review(&mut self) {
        let is_root = || standing::has_thread(self.pid, |present| present.user == 0) == Some(true);
        let is_still = || {
            is_root()
                && standing::may_look_into_all(self.pid)
                && self.life.as_ref().is_some_and(standing::is_alive)
        };
        if matches!(self.rights, Rights::All) && !is_still() {
            tracing::info!(pid = self.pid, "it is root's no more: it is shown nothing that is new");
            self.rights = Rights::Nothing;
            self.pending.clear();
        }
    }
}

impl State {
    /// Lets a client read along. It is told of what there is by [`State::tell_links`].
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

    /// A client reads along no more.
    pub(crate) fn end_capture(&mut self, id: CaptureId) {
        self.captures.all.retain(|capture| capture.id != id);
        if self.captures.all.is_empty() {
            self.links.unsee();
            self.note_released();
        }
    }

    /// There is a link more, on which nobody has a place yet.
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

    /// Two ends have been given a place in a link. Before they are told of it.
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

    /// Tells a client of links as long as it reads what it is told.
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

    /// Tells those who read along what has ended since the last time.
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
    // What one side receives first, the other has sent first.
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

/// As it is said in a hello.
fn padded(program: &str) -> [u8; 32] {
    let mut name = [0; 32];
    name.iter_mut().zip(program.bytes()).for_each(|(to, from)| *to = from);
    name
}
