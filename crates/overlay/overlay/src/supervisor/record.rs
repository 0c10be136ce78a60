//! The state that outlives a killed supervisor: shared memory that its successor maps again.
//!
//! All descriptors of a supervisor also outlive it, because its keeper shares them
//! (`shunt_sys::keeper`). The record says by their fds what they are. `recover` has the states of a
//! call and of an accepted connection.
//!
//! | part | content |
//! | --- | --- |
//! | header | the program, the listener, the connection to the router, and flags |
//! | slots | one for each thread: the call that it handles, written by the kernel, and its state |
//! | accepted | connections that were accepted, and that no call has got yet |
//! | listening | listening sockets, and where the program has them |
//!
//! Each field is written before the step that it describes. The process may be killed between any
//! two instructions, so a field may describe a step that was not made. The successor checks that.

mod accepted;
mod calls;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

use shunt_sys::keeper::Signs;
use shunt_sys::mapping::Mapping;
use shunt_sys::seccomp::{Listener, Notification};
use shunt_sys::{Errno, memfd};

use super::NEVER;
use accepted::entry_at;
use calls::slot_at;

pub(super) use accepted::{Entry, Left, Noted};
pub(crate) use calls::Slot;
pub(super) use calls::{Phase, Reply};

/// The mark of a record, and the version of what follows it.
const MAGIC: u32 = 0x7368_6e74;
const LAYOUT: u32 = 1;

const MAGIC_AT: usize = 0;
const LAYOUT_AT: usize = 4;
/// The fd of the supervisor's program. Every layout has it here.
const PROGRAM_AT: usize = 8;
const IS_OVER_AT: usize = 12;
const BEAT_AT: usize = 16;
const GUARDS_AT: usize = 20;
const LISTENER_AT: usize = 24;
const HAS_RINGS_AT: usize = 28;
const IS_BLIND_AT: usize = 32;
const STANDING_AT: usize = 36;
const MARKS_AT: usize = 40;
const WELCOME_LEN_AT: usize = 44;
const ACCEPTING_AT: usize = 48;
const STAGE_AT: usize = 580;
/// The socket with messages about held connections. Unused in earlier versions.
const HELD_AT: usize = 584;
const ROUTER_LEN_AT: usize = 56;
const NEXT_AT: usize = 60;
const ROUTER_AT: usize = 64;
const ROUTER_MOST: usize = 512;
const WELCOME_AT: usize = 1024;
const WELCOME_MOST: usize = SLOTS_AT - WELCOME_AT;

const SLOTS_AT: usize = 4096;
/// More than a supervisor has threads.
const SLOTS: usize = 1024;
const SLOT: usize = 128;
const ACCEPTED_AT: usize = SLOTS_AT + SLOTS * SLOT;
const ACCEPTED: usize = 2048;
const ENTRY: usize = 16;

const LISTENING_AT: usize = ACCEPTED_AT + ACCEPTED * ENTRY;
/// As many as a router takes of one supervisor.
pub(super) const LISTENING: usize = 4096;
/// The number of threads that are remembered for each listening socket. One that lives suffices.
pub(super) const HOLDERS: usize = 5;
const LISTENING_SIZE: usize = 8 + 8 * HOLDERS;

const LEN: usize = (LISTENING_AT + LISTENING * LISTENING_SIZE).next_multiple_of(4096);

/// The shared memory.
#[derive(Debug)]
pub(crate) struct Record {
    file: OwnedFd,
    memory: Mapping,
    slots: Mutex<Free>,
    accepted: Mutex<Free>,
}

/// The unused places of a table, up to the largest one that was used.
#[derive(Debug)]
struct Free {
    unused: Vec<usize>,
    next: usize,
    most: usize,
}

/// How far the supervisor of the record is. Written at each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It reads the listener.
    Supervised,
    /// It continues a killed supervisor's work. `attempt` counts successors that did, from 1.
    TakenOver { attempt: u32 },
}

/// The connection to the router that a killed supervisor has left.
#[derive(Debug)]
pub(super) struct Standing {
    pub(super) socket: i32,
    pub(super) marks: Option<i32>,
    pub(super) welcome: Vec<u8>,
}

/// The record was made by another version. Only its supervisor's program can read it.
#[derive(Debug)]
pub(super) struct AnotherLayout {
    pub(super) file: OwnedFd,
    pub(super) program: i32,
}

impl Record {
    pub(crate) fn new() -> Result<Record, Errno> {
        let file = memfd::create_fixed("shunt-supervisor", LEN)?;
        let memory = Mapping::map(&file, LEN)?;
        let record = Record::over(file, memory);
        record.half(LAYOUT_AT).store(LAYOUT, SeqCst);
        record.half(MAGIC_AT).store(MAGIC, SeqCst);
        Ok(record)
    }

    /// Maps the record of a killed supervisor.
    pub(super) fn open(file: OwnedFd) -> Result<Result<Record, AnotherLayout>, Errno> {
        let len = usize::try_from(rustix::fs::fstat(&file)?.st_size).map_err(|_| Errno::INVAL)?;
        let mapped = |len| Mapping::map(&file, len);
        let header = mapped(len.min(4096))?;
        let of_header = |at| header.half_word(at).map_or(0, |it: &AtomicU32| it.load(SeqCst));
        if of_header(MAGIC_AT) != MAGIC {
            return Err(Errno::INVAL);
        }
        if of_header(LAYOUT_AT) != LAYOUT || len != LEN {
            return Ok(Err(AnotherLayout { program: of_header(PROGRAM_AT) as i32, file }));
        }
        let memory = mapped(LEN)?;
        let record = Record::over(file, memory);
        record.slots.lock().expect(NEVER).reserve(|index| record.notification(index).is_some());
        record.accepted.lock().expect(NEVER).reserve(|index| record.word(entry_at(index)).load(SeqCst) != 0);
        Ok(Ok(record))
    }

    fn over(file: OwnedFd, memory: Mapping) -> Record {
        Record { file, memory, slots: Free::new(SLOTS), accepted: Free::new(ACCEPTED) }
    }

    /// Returns the fd by which a successor finds the memory.
    pub(super) fn number(&self) -> i32 {
        self.file.as_raw_fd()
    }

    pub(super) fn signs(&self) -> Signs<'_> {
        Signs { is_over: self.half(IS_OVER_AT), beat: self.half(BEAT_AT) }
    }

    pub(super) fn beat(&self) {
        self.half(BEAT_AT).fetch_add(1, SeqCst);
    }

    /// Notes that this process ends because no process is left under the filter.
    pub(super) fn set_over(&self) {
        self.half(IS_OVER_AT).store(1, SeqCst);
    }

    pub(super) fn stage(&self) -> Stage {
        match self.half(STAGE_AT).load(SeqCst) {
            0 => Stage::Supervised,
            attempt => Stage::TakenOver { attempt },
        }
    }

    pub(super) fn set_stage(&self, stage: Stage) {
        let attempt = match stage {
            Stage::Supervised => 0,
            Stage::TakenOver { attempt } => attempt,
        };
        self.half(STAGE_AT).store(attempt, SeqCst);
    }

    pub(super) fn set_program(&self, program: impl AsFd) {
        self.half(PROGRAM_AT).store(program.as_fd().as_raw_fd() as u32, SeqCst);
    }

    pub(super) fn set_listener(&self, listener: &Listener) {
        self.half(LISTENER_AT).store(listener.as_fd().as_raw_fd() as u32, SeqCst);
    }

    pub(super) fn listener(&self) -> i32 {
        self.half(LISTENER_AT).load(SeqCst) as i32
    }

    /// Notes the router's path, and whether the program is not trusted.
    pub(super) fn set_router(&self, router: &Path, guards: bool) {
        use std::os::unix::ffi::OsStrExt;
        let path = router.as_os_str().as_bytes();
        if path.len() <= ROUTER_MOST && self.memory.put(ROUTER_AT, path) {
            self.half(ROUTER_LEN_AT).store(path.len() as u32, SeqCst);
        }
        self.half(GUARDS_AT).store(guards.into(), SeqCst);
    }

    pub(super) fn router(&self) -> PathBuf {
        use std::os::unix::ffi::OsStringExt;
        let path = self.bytes(ROUTER_AT, self.half(ROUTER_LEN_AT).load(SeqCst) as usize, ROUTER_MOST);
        PathBuf::from(std::ffi::OsString::from_vec(path))
    }

    pub(super) fn guards(&self) -> bool {
        self.half(GUARDS_AT).load(SeqCst) != 0
    }

    pub(super) fn set_rings(&self) {
        self.half(HAS_RINGS_AT).store(1, SeqCst);
    }

    pub(super) fn has_rings(&self) -> bool {
        self.half(HAS_RINGS_AT).load(SeqCst) != 0
    }

    pub(super) fn set_blind(&self) {
        self.half(IS_BLIND_AT).store(1, SeqCst);
    }

    pub(super) fn is_blind(&self) -> bool {
        self.half(IS_BLIND_AT).load(SeqCst) != 0
    }

    /// Notes the connection to the router, with its welcome. `None`: there is none.
    pub(super) fn set_standing(&self, standing: Option<(&OwnedFd, Option<&OwnedFd>, &[u8])>) {
        let Some((socket, marks, welcome)) = standing else {
            return self.half(STANDING_AT).store(0, SeqCst);
        };
        if welcome.len() > WELCOME_MOST || !self.memory.put(WELCOME_AT, welcome) {
            return;
        }
        self.half(WELCOME_LEN_AT).store(welcome.len() as u32, SeqCst);
        self.half(MARKS_AT).store(marks.map_or(0, |marks| marks.as_raw_fd() as u32), SeqCst);
        self.half(STANDING_AT).store(socket.as_raw_fd() as u32, SeqCst);
    }

    /// Notes a connection to the router on which the listening sockets are about to be shown.
    /// `None`: it has taken the place of the other one.
    pub(super) fn set_next(&self, socket: Option<&OwnedFd>) {
        self.half(NEXT_AT).store(socket.map_or(0, |socket| socket.as_raw_fd() as u32), SeqCst);
    }

    pub(super) fn next(&self) -> Option<i32> {
        Some(self.half(NEXT_AT).load(SeqCst) as i32).filter(|number| *number > 0)
    }

    /// Notes the socket from which a successor receives the held connections.
    pub(super) fn set_held(&self, socket: &OwnedFd) {
        self.half(HELD_AT).store(socket.as_raw_fd() as u32, SeqCst);
    }

    /// Returns the noted socket once.
    pub(super) fn take_held(&self) -> Option<i32> {
        Some(self.half(HELD_AT).swap(0, SeqCst) as i32).filter(|number| *number > 0)
    }

    pub(super) fn standing(&self) -> Option<Standing> {
        let number = |at| Some(self.half(at).load(SeqCst) as i32).filter(|number| *number > 0);
        let socket = number(STANDING_AT)?;
        Some(Standing { socket, marks: number(MARKS_AT), welcome: self.last_welcome() })
    }

    /// Returns the Welcome of the last router, which may have ended.
    pub(super) fn last_welcome(&self) -> Vec<u8> {
        self.bytes(WELCOME_AT, self.half(WELCOME_LEN_AT).load(SeqCst) as usize, WELCOME_MOST)
    }

    /// Notes the listening socket from which a thread is about to accept. Only one does at a time.
    pub(super) fn set_accepting(&self, cookie: u64) {
        self.word(ACCEPTING_AT).store(cookie, SeqCst);
    }

    pub(super) fn accepting(&self) -> Option<u64> {
        Some(self.word(ACCEPTING_AT).load(SeqCst)).filter(|cookie| *cookie != 0)
    }

    /// Notes where the program has a listening socket, at a place of the table.
    pub(super) fn set_listening(&self, index: usize, cookie: u64, holders: &[(u32, i32)]) {
        let at = LISTENING_AT + index * LISTENING_SIZE;
        for place in 0..HOLDERS {
            let (thread, number) = holders.get(place).copied().unwrap_or_default();
            self.word(at + 8 + 8 * place).store(u64::from(thread) << 32 | u64::from(number as u32), SeqCst);
        }
        self.word(at).store(cookie, SeqCst);
    }

    pub(super) fn clear_listening(&self, index: usize) {
        self.word(LISTENING_AT + index * LISTENING_SIZE).store(0, SeqCst);
    }

    /// Returns a listening socket's cookie, and the threads and fds that have it.
    pub(super) fn listening(&self, index: usize) -> Option<(u64, Vec<(u32, i32)>)> {
        let at = LISTENING_AT + index * LISTENING_SIZE;
        let cookie = Some(self.word(at).load(SeqCst)).filter(|cookie| *cookie != 0)?;
        let holder = |place| {
            let packed = self.word(at + 8 + 8 * place).load(SeqCst);
            ((packed >> 32) as u32, packed as u32 as i32)
        };
        Some((cookie, (0..HOLDERS).map(holder).filter(|(thread, _)| *thread != 0).collect()))
    }

    fn notification(&self, index: usize) -> Option<Notification> {
        Notification::stored(&self.memory, slot_at(index))
    }

    fn bytes(&self, at: usize, len: usize, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.min(most)];
        let is_whole = self.memory.take(at, &mut bytes);
        debug_assert!(is_whole);
        bytes
    }

    fn half(&self, at: usize) -> &AtomicU32 {
        self.memory.half_word(at).expect("inside the record")
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.memory.word(at).expect("inside the record")
    }
}

impl Free {
    fn new(most: usize) -> Mutex<Free> {
        Mutex::new(Free { unused: Vec::new(), next: 0, most })
    }

    fn take(&mut self) -> Option<usize> {
        if let Some(index) = self.unused.pop() {
            return Some(index);
        }
        let index = self.next;
        self.next += usize::from(index < self.most);
        (index < self.most).then_some(index)
    }

    fn put(&mut self, index: usize) {
        self.unused.push(index);
    }

    /// Sets the unused places, in a table of which some are used.
    fn reserve(&mut self, is_used: impl Fn(usize) -> bool) {
        self.next = (0..self.most).rev().find(|index| is_used(*index)).map_or(0, |last| last + 1);
        self.unused = (0..self.next).filter(|index| !is_used(*index)).collect();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn a_successor_finds_what_was_recorded() {
        let record = Arc::new(Record::new().unwrap());
        let other = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        record.set_router(Path::new("/run/router.sock"), true);
        record.set_standing(Some((&other, None, b"{}")));
        assert_eq!(record.stage(), Stage::Supervised);
        record.set_stage(Stage::TakenOver { attempt: 2 });
        record.set_listening(3, 77, &[(5, 9), (6, -1)]);
        let slot = record.claim().unwrap();
        let call = Notification { id: 12, thread: 34, number: 42, arguments: [1, 2, 3, 4, 5, 6] };
        slot.store(&call);
        slot.commits((&other, 1000), None, Reply::InProgress);
        let (entry, dropped) = (record.accepted(&other, 77), record.accepted(&other, 78));
        let noted = entry.begin(&record.file);
        drop(dropped);

        let file = record.file.try_clone().unwrap();
        let found = Arc::new(Record::open(file).unwrap().unwrap());
        assert_eq!((found.router(), found.guards()), (PathBuf::from("/run/router.sock"), true));
        assert_eq!(found.stage(), Stage::TakenOver { attempt: 2 });
        let standing = found.standing().unwrap();
        assert_eq!((standing.socket, standing.marks), (other.as_raw_fd(), None));
        assert_eq!(standing.welcome, b"{}");
        assert_eq!(found.listening(3), Some((77, vec![(5, 9), (6, -1)])));
        assert_eq!(found.listening(2), None);
        let calls = found.calls();
        let [(notification, _, phase)] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!(*notification, call);
        assert_eq!(phase.commit, Some((other.as_raw_fd(), 1000)));
        assert_eq!(phase.reply, Reply::InProgress as u32);
        let left = found.left();
        let [Left { socket, conversation, cookie: 77, .. }] = &left[..] else { panic!("{left:?}") };
        assert_eq!((*socket, *conversation), (other.as_raw_fd(), Some(record.number())));
        // Places in use are not given to others.
        let claimed = found.claim().unwrap();
        assert_ne!(claimed.index, slot.index);
        // The conversation has ended, or another one has begun.
        let conversation = || {
            let left = found.left();
            let conversation = left[0].conversation;
            // The entry goes on.
            std::mem::forget(left);
            conversation
        };
        noted.clear(&other);
        assert_eq!(conversation(), Some(record.number()));
        noted.clear(&record.file);
        assert_eq!(conversation(), None);
        std::mem::forget((slot, entry));
    }

    #[test]
    fn a_record_of_another_layout_names_its_program() {
        let record = Record::new().unwrap();
        record.set_program(&record.file);
        record.half(LAYOUT_AT).store(LAYOUT + 1, SeqCst);
        let AnotherLayout { program, .. } =
            Record::open(record.file.try_clone().unwrap()).unwrap().err().unwrap();
        assert_eq!(program, record.number());
    }
}
