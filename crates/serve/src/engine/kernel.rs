//! The kernel engine as user space has it: the program of engine.bpf.h, loaded with a service, and its maps. One for each
//! worker. Nothing is pinned: all of it is gone when the process is.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use aya::maps::{HashMap, MapData, RingBuf, SockMap};
use aya::programs::{Iter, ProgramError, SkSkb};
use aya::{Btf, Ebpf, EbpfLoader};
use rustix::net::sockopt::socket_cookie;
use shunt_sys::mapping::Mapping;
use shunt_sys::tuning::set_receive_low_water;

use super::backends::Backends;
use super::choose::Hashing;
use crate::service::verifier::{Complaint, LoadError, check_loadable};

/// See the module.
pub(crate) struct Kernel {
    sockets: SockMap<MapData>,
    cookies: HashMap<MapData, u64, u32>,
    left: RingBuf<MapData>,
    conversations: Mapping,
    ends: Mapping,
    placed: Mapping,
    points: Mapping,
    stride_bits: u32,
    /// Numbers of conversations that nobody has.
    free: Vec<u32>,
    /// Why sockets stay in the map until their connection ends, if they do.
    stays: Option<LoadError>,
    // Last: the program is detached after the map is empty.
    loaded: Ebpf,
}

/// Sockets of all conversations of a worker together.
const PLACES: u32 = 1 << 15;
/// A conversation has so many at most, as a power of two.
const MOST_BITS: u32 = 8;
/// Bytes of struct shunt_conversation and of struct shunt_end.
const CONVERSATION: usize = KEPT_AT + KEPT + 296;
const KEPT_AT: usize = 12 * 8;
const END: usize = 8 * 8;
/// SHUNT_KEPT and SHUNT_POINTS in engine.bpf.h.
pub(crate) const KEPT: usize = 512;
const POINTS: usize = 65536;

/// The words of struct shunt_conversation, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Of {
    Word,
    Why,
    Outstanding,
    Backend,
    KeptLength,
    Messages,
    Bytes,
    Replies,
    Several,
}

/// The words of struct shunt_end, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Has {
    IsThere,
    Redirected,
    Written,
    Acknowledged,
    Passed,
    Messages,
    Leaves,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Kernel").field("free", &self.free.len()).finish_non_exhaustive()
    }
}

impl Kernel {
    /// Loads a service. `is_auto`: a conversation comes back as soon as user space would be faster.
    pub(crate) fn load(object: &[u8], backends: usize, is_auto: bool) -> Result<Kernel, LoadError> {
        check_loadable(object)?;
        let stride_bits = (backends as u32 + 1).next_power_of_two().ilog2().clamp(1, MOST_BITS);
        let count = PLACES >> stride_bits;
        let refused = |error: &(dyn std::error::Error + 'static)| LoadError::of(error);
        let mut loaded = EbpfLoader::new()
            .override_global("shunt_stride_bits", &stride_bits, true)
            .override_global("shunt_is_auto", &u32::from(is_auto), true)
            .map_max_entries("shunt_sockets", PLACES)
            .map_max_entries("shunt_cookies", PLACES)
            .map_max_entries("shunt_ends", PLACES)
            .map_max_entries("shunt_conversations", count)
            .load(object)
            .map_err(|error| refused(&error))?;
        // Before the maps are taken out: it is loaded with their descriptors.
        let stays = load_leaving(&mut loaded).err();
        let program = loaded.program_mut(PROGRAM).ok_or(LoadError::NotAService)?;
        let program: &mut SkSkb = program.try_into().map_err(|_| LoadError::NotAService)?;
        program.load().map_err(|error| match &error {
            ProgramError::LoadError { verifier_log, .. } => {
                match Complaint::read(PROGRAM, &verifier_log.to_string()) {
                    Some(complaint) => LoadError::Unsafe(complaint),
                    None => refused(&error),
                }
            }
            _ => refused(&error),
        })?;
        let map = |loaded: &mut Ebpf, name| loaded.take_map(name).ok_or(LoadError::NotAService);
        let sockets: SockMap<MapData> =
            map(&mut loaded, "shunt_sockets")?.try_into().map_err(|_| LoadError::NotAService)?;
        let cookies = map(&mut loaded, "shunt_cookies")?.try_into().map_err(|_| LoadError::NotAService)?;
        let left = map(&mut loaded, "shunt_left")?.try_into().map_err(|_| LoadError::NotAService)?;
        let mapped = |loaded: &mut Ebpf, name, each: usize, count: u32| {
            let map: aya::maps::Map = map(loaded, name)?;
            let aya::maps::Map::Array(data) = &map else { return Err(LoadError::NotAService) };
            let is_ours = data.info().is_ok_and(|info| info.value_size() as usize == each);
            if !is_ours {
                return Err(LoadError::OtherVersion);
            }
            let len = (each * count as usize).next_multiple_of(rustix::param::page_size());
            Mapping::map_of_kernel(data.fd(), len).map_err(|error| refused(&std::io::Error::from(error)))
        };
        let conversations = mapped(&mut loaded, "shunt_conversations", CONVERSATION, count)?;
        let ends = mapped(&mut loaded, "shunt_ends", END, PLACES)?;
        let placed = mapped(&mut loaded, "shunt_placed", 3 * 8, 1)?;
        let points = mapped(&mut loaded, "shunt_points", 8, POINTS as u32)?;
        let program = loaded.program_mut(PROGRAM).ok_or(LoadError::NotAService)?;
        let program: &mut SkSkb = program.try_into().map_err(|_| LoadError::NotAService)?;
        program.attach(sockets.fd()).map_err(|error| refused(&error))?;
        let free = (0..count).rev().collect();
        Ok(Kernel {
            sockets,
            cookies,
            left,
            conversations,
            ends,
            placed,
            points,
            stride_bits,
            free,
            stays,
            loaded,
        })
    }

    /// How keys become backends from now on. No conversation may be the kernel's meanwhile.
    pub(crate) fn set_backends(&self, backends: &Backends) {
        let (hashing, points) = (backends.chooser.hashing, backends.chooser.placement.points());
        let is_known = hashing != Hashing::Service && points.len() <= POINTS;
        let count = if is_known { backends.list.len() } else { 0 };
        let settings = [count as u64, u64::from(hashing == Hashing::Ketama), points.len() as u64];
        for (at, value) in settings.into_iter().enumerate() {
            self.placed.word(at * 8).expect("inside").store(value, SeqCst);
        }
        for (at, point) in points.iter().take(POINTS).enumerate() {
            let value = u64::from(point.value) << 32 | u64::from(point.backend);
            self.points.word(at * 8).expect("inside").store(value, SeqCst);
        }
    }

    /// Backends of a conversation that can have a place.
    pub(crate) fn reach(&self) -> usize {
        (1 << self.stride_bits) - 1
    }

    /// A number for a conversation, if there is one left.
    pub(crate) fn take_number(&mut self) -> Option<u32> {
        let number = self.free.pop()?;
        let begin = number as usize * CONVERSATION;
        let zeroed = self.conversations.zero(begin, KEPT_AT);
        let first = self.place(number, 0) as usize * END;
        let zeroed = zeroed && self.ends.zero(first, END << self.stride_bits);
        debug_assert!(zeroed, "inside");
        Some(number)
    }

    /// Of a conversation none of whose sockets is in the map any more.
    pub(crate) fn give_number(&mut self, number: u32) {
        self.free.push(number);
    }

    /// Another socket will be at this position.
    pub(crate) fn clear(&mut self, number: u32, position: usize) {
        let zeroed = self.ends.zero(self.place(number, position) as usize * END, END);
        debug_assert!(zeroed, "inside");
    }

    /// From now on the program is asked about what arrives at this socket, and about what has arrived and was not read.
    pub(crate) fn insert(&mut self, number: u32, position: usize, socket: &OwnedFd) -> std::io::Result<()> {
        let place = self.place(number, position);
        let cookie = socket_cookie(socket)?;
        self.cookies.insert(cookie, place, 0).map_err(std::io::Error::other)?;
        if let Err(error) = self.sockets.set(place, socket, 0) {
            let _ = self.cookies.remove(&cookie);
            return Err(std::io::Error::other(error));
        }
        // What arrived before would else wait for the next segment.
        let _ = set_receive_low_water(socket, 1);
        self.has(number, position, Has::IsThere).store(1, SeqCst);
        Ok(())
    }

    /// Of a socket that is over; what it had not sent on is lost.
    pub(crate) fn remove(&mut self, number: u32, position: usize, socket: &OwnedFd) {
        self.has(number, position, Has::IsThere).store(0, SeqCst);
        let _ = self.sockets.clear_index(&self.place(number, position));
        if let Ok(cookie) = socket_cookie(socket) {
            let _ = self.cookies.remove(&cookie);
        }
    }

    /// Why sockets stay in the map until their connection ends, if they do.
    pub(crate) fn stays(&self) -> Option<&LoadError> {
        self.stays.as_ref()
    }

    /// Takes out of the map those sockets that can leave it, of those whose [`Has::Leaves`] is set. Looks at every TCP socket
    /// of the network namespace.
    pub(crate) fn let_leave(&mut self) -> std::io::Result<()> {
        let program =
            self.loaded.program_mut(LEAVING).and_then(|program| <&mut Iter>::try_from(program).ok());
        let Some(program) = program else { return Ok(()) };
        let link = program.attach().map_err(std::io::Error::other)?;
        let link = program.take_link(link).map_err(std::io::Error::other)?;
        let mut run = link.into_file().map_err(std::io::Error::other)?;
        // It says nothing: the end of the file is the end of the sockets. Among very many it wants to be asked again.
        loop {
            match run.read(&mut [0; 8]) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// A word of a conversation.
    pub(crate) fn of(&self, number: u32, word: Of) -> &AtomicU64 {
        self.conversations.word(number as usize * CONVERSATION + word as usize * 8).expect("inside")
    }

    /// A word of one of its sockets.
    pub(crate) fn has(&self, number: u32, position: usize, word: Has) -> &AtomicU64 {
        self.ends.word(self.place(number, position) as usize * END + word as usize * 8).expect("inside")
    }

    /// Whether the program has passed it to user space.
    pub(crate) fn gave_back(&self, number: u32) -> bool {
        self.of(number, Of::Word).load(SeqCst) & 1 == 0
    }

    /// The beginning of the message that is under way, as much as was kept.
    pub(crate) fn kept(&self, number: u32) -> Vec<u8> {
        let length = (self.of(number, Of::KeptLength).load(SeqCst) as usize).min(KEPT);
        let begin = number as usize * CONVERSATION + KEPT_AT;
        let words = (begin..begin + length.next_multiple_of(8)).step_by(8);
        let word = |at| self.conversations.word(at).expect("inside").load(SeqCst).to_ne_bytes();
        let mut kept: Vec<u8> = words.flat_map(word).collect();
        kept.truncate(length);
        kept
    }

    /// A conversation that the program has given back, if there is another one.
    pub(crate) fn next_left(&mut self) -> Option<u32> {
        let item = self.left.next()?;
        Some(u32::from_ne_bytes(item.get(..4)?.try_into().expect("four bytes")))
    }

    /// Readable when there is one.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.left.as_fd()
    }

    fn place(&self, number: u32, position: usize) -> u32 {
        (number << self.stride_bits) + position as u32
    }
}

/// The program that takes sockets out of the map. Not every kernel has it.
fn load_leaving(loaded: &mut Ebpf) -> Result<(), LoadError> {
    let refused = |error: &(dyn std::error::Error + 'static)| LoadError::of(error);
    let types = Btf::from_sys_fs().map_err(|error| refused(&error))?;
    let program = loaded.program_mut(LEAVING).ok_or(LoadError::NotAService)?;
    let program: &mut Iter = program.try_into().map_err(|_| LoadError::NotAService)?;
    program.load("tcp", &types).map_err(|error| refused(&error))
}

const PROGRAM: &str = "shunt_arrived";
const LEAVING: &str = "shunt_leaving";
