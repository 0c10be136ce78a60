//! Names for what a process has many of, and uses again when it is done with. Whoever holds one notices when its place has gone
//! to another.

/// A name for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndpointRef(Name);

/// A name for an epoll instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EpollRef(Name);

/// A place, and how often it had been used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name {
    index: u32,
    generation: u32,
}

impl Name {
    /// As a number below 2^56.
    fn pack(self) -> u64 {
        u64::from(self.index) | u64::from(self.generation) << 24
    }

    fn unpack(word: u64) -> Name {
        Name { index: word as u32 & 0xff_ffff, generation: (word >> 24) as u32 }
    }
}

macro_rules! name {
    ($name:ident) => {
        impl $name {
            pub(crate) fn new(index: u32, generation: u32) -> $name {
                $name(Name { index, generation })
            }

            pub(crate) fn index(self) -> u32 {
                self.0.index
            }

            pub(crate) fn generation(self) -> u32 {
                self.0.generation
            }

            /// As a number below 2^56.
            pub(crate) fn pack(self) -> u64 {
                self.0.pack()
            }

            pub(crate) fn unpack(word: u64) -> $name {
                $name(Name::unpack(word))
            }
        }
    };
}

name!(EndpointRef);
name!(EpollRef);
