//! The memory with the state of a service. `include/shunt/state.h` describes its contents.
//!
//! The state of the service is one mapping, of a BPF map if the service runs in the kernel. All its
//! words are read and changed atomically. The state of a connection belongs to one half at a time.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use aya::maps::{Array, ArrayOfMaps, IterableMap, Map, MapData};
use shunt_sys::mapping::Mapping;
use shunt_sys::memfd;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::verifier::LoadError;
use crate::cache::memory::SEGMENT;

/// `SHUNT_MAX_ELEMENT` in state.h, the size of the BPF map's values.
const PIECE: usize = 512;
/// The most bytes of a service's state.
pub const MAX_STATE: usize = 1 << 30;
/// `BPF_F_MMAPABLE` and `BPF_F_INNER_MAP`, as state.h declares the map.
const FLAGS: u32 = 1 << 10 | 1 << 12;

/// The state of a connection: the service's, zeroed when the client connects, and behind it `struct
/// shunt_connection` of events.h.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Session([u64; Session::BYTES / 8]);

impl Session {
    /// `SHUNT_MAX_SESSION` in state.h, and the size of `struct shunt_connection` in events.h.
    pub const BYTES: usize = Session::OWN + 16 + 16 * Session::TIMERS;
    const OWN: usize = 256;
    /// `SHUNT_TIMERS` in service.h.
    pub(crate) const TIMERS: usize = 4;
    const HANDLE: usize = Session::OWN / 8;

    /// The state of a new connection with this handle.
    pub(crate) fn new(handle: u64) -> Session {
        let mut session = Session::default();
        session.0[Session::HANDLE] = handle;
        session
    }

    /// Returns the handle of the connection.
    pub(crate) fn handle(&self) -> u64 {
        self.0[Session::HANDLE]
    }

    /// Returns the set of timers that a callback has armed or stopped since the last call.
    pub(crate) fn take_armed(&mut self) -> u64 {
        std::mem::take(&mut self.0[Session::HANDLE + 1])
    }

    /// Returns a timer as the service has armed it last.
    pub(crate) fn timer(&self, number: usize) -> Armed {
        let at = Session::HANDLE + 2 + 2 * number;
        Armed { after: self.0[at] as u32, every: (self.0[at] >> 32) as u32, context: self.0[at + 1] }
    }

    /// Returns a word.
    pub(crate) fn get(&self, word: usize) -> u64 {
        self.0[word]
    }

    pub(crate) fn set(&mut self, word: usize, value: u64) {
        self.0[word] = value;
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u64 {
        self.0.as_mut_ptr()
    }
}

/// When a timer calls the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Armed {
    /// Milliseconds until the first call, or 0 if it is stopped.
    pub(crate) after: u32,
    /// Milliseconds between later calls, or 0 if there are none.
    pub(crate) every: u32,
    pub(crate) context: u64,
}

impl Default for Session {
    fn default() -> Session {
        Session([0; Session::BYTES / 8])
    }
}

/// The memory of a service's state, zeroed when it is created.
pub struct Store {
    memory: Mapping,
    /// The map that the memory belongs to, unless the service runs in user space only.
    map: Option<Shared>,
}

/// A BPF map that user space maps.
enum Shared {
    State(Array<MapData, [u8; PIECE]>),
    Contents(Array<MapData, [u8; SEGMENT]>),
}

/// An error that prevents a service from having its state.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The state is too large.
    #[error("the service's state has {0} bytes; {MAX_STATE} are the most")]
    TooLarge(usize),
    /// There is no memory for it.
    #[error("there is no memory for the service's state of {size} bytes: {error}")]
    Memory {
        /// The requested size.
        size: usize,
        /// The system's error.
        error: std::io::Error,
    },
}

impl std::fmt::Debug for Store {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_shared = self.map.is_some();
        formatter
            .debug_struct("Store")
            .field("len", &self.memory.len())
            .field("is_shared", &is_shared)
            .finish()
    }
}

impl Store {
    /// Creates the memory of `size` bytes. With `in_kernel` it is the kernel's, if this process may
    /// create maps; otherwise loading the service into the kernel fails, and says why.
    pub fn new(size: usize, in_kernel: bool) -> Result<Arc<Store>, StoreError> {
        if size > MAX_STATE {
            return Err(StoreError::TooLarge(size));
        }
        let store = match in_kernel.then(|| Store::in_kernel(size)).flatten() {
            Some(store) => store,
            None => Store::in_user_space(size)
                .map_err(|error| StoreError::Memory { size, error: error.into() })?,
        };
        Ok(Arc::new(store))
    }

    /// Creates the memory of a content store, of `size` bytes: whole segments. `in_kernel` is as for
    /// [`Store::new`].
    pub(crate) fn new_contents(size: usize, in_kernel: bool) -> Result<Arc<Store>, StoreError> {
        let shared = || {
            let map = Array::<MapData, [u8; SEGMENT]>::create((size / SEGMENT) as u32, FLAGS).ok()?;
            let memory = Mapping::map_of_kernel(IterableMap::map(&map).fd(), size).ok()?;
            Some(Store { memory, map: Some(Shared::Contents(map)) })
        };
        let store = match in_kernel.then(shared).flatten() {
            Some(store) => store,
            None => Store::in_user_space(size)
                .map_err(|error| StoreError::Memory { size, error: error.into() })?,
        };
        Ok(Arc::new(store))
    }

    fn in_user_space(size: usize) -> rustix::io::Result<Store> {
        let len = mapped(size);
        let memory = Mapping::map(memfd::create_fixed("shunt-state", len)?, len)?;
        Ok(Store { memory, map: None })
    }

    fn in_kernel(size: usize) -> Option<Store> {
        let pieces = size.div_ceil(PIECE).max(1);
        let map = Array::<MapData, [u8; PIECE]>::create(pieces as u32, FLAGS).ok()?;
        let memory = Mapping::map_of_kernel(IterableMap::map(&map).fd(), mapped(size)).ok()?;
        Some(Store { memory, map: Some(Shared::State(map)) })
    }

    /// Gives the programs of a loaded object this memory.
    pub(crate) fn lend(&self, memories: &mut Map) -> Result<(), LoadError> {
        let not_a_service = |_| LoadError::NotAService;
        let set = match self.map.as_ref().ok_or(LoadError::NotPermitted)? {
            Shared::State(map) => {
                let memories = ArrayOfMaps::<&mut MapData, Array<MapData, [u8; PIECE]>>::try_from(memories);
                memories.map_err(not_a_service)?.set(0, map, 0)
            }
            Shared::Contents(map) => {
                let memories = ArrayOfMaps::<&mut MapData, Array<MapData, [u8; SEGMENT]>>::try_from(memories);
                memories.map_err(not_a_service)?.set(0, map, 0)
            }
        };
        set.map_err(|error| LoadError::of(&error))
    }

    /// Returns the size of the memory.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Returns a copy of the whole state.
    pub fn snapshot(&self) -> Vec<u8> {
        self.bytes(0, self.memory.len())
    }

    /// Returns the word at `offset`, if it is inside and aligned.
    pub(crate) fn at(&self, offset: usize) -> Option<&AtomicU64> {
        self.memory.word(offset)
    }

    /// Copies bytes to `offset`.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        let is_inside = self.memory.put(offset, bytes);
        debug_assert!(is_inside);
    }

    /// Copies bytes from `offset`.
    pub(crate) fn take(&self, offset: usize, bytes: &mut [u8]) {
        let is_inside = self.try_take(offset, bytes);
        debug_assert!(is_inside);
    }

    /// Copies bytes from `offset`. Returns false if they are not inside.
    #[must_use]
    pub(crate) fn try_take(&self, offset: usize, bytes: &mut [u8]) -> bool {
        self.memory.take(offset, bytes)
    }

    /// Returns the word at `offset`, or 0 outside of the state.
    pub(crate) fn word(&self, offset: usize) -> u64 {
        self.memory.word(offset).map_or(0, |word| word.load(std::sync::atomic::Ordering::SeqCst))
    }

    /// Returns a copy of the bytes at `offset`. Words in it may be of different moments.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let _ = self.memory.take(offset, &mut bytes);
        bytes
    }
}

fn mapped(size: usize) -> usize {
    size.max(1).next_multiple_of(rustix::param::page_size())
}
