//! Names for what a process has many of, and uses again when it is done with. Whoever holds one notices when its place has gone
//! to another.

/// A place, and how often it had been used again.
macro_rules! name {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct $name {
            index: u32,
            generation: u32,
        }

        impl $name {
            pub(crate) fn new(index: u32, generation: u32) -> $name {
                $name { index, generation }
            }

            pub(crate) fn index(self) -> u32 {
                self.index
            }

            pub(crate) fn generation(self) -> u32 {
                self.generation
            }

            /// As a number below 2^56.
            pub(crate) fn pack(self) -> u64 {
                u64::from(self.index) | u64::from(self.generation) << 24
            }

            pub(crate) fn unpack(word: u64) -> $name {
                $name { index: word as u32 & 0xff_ffff, generation: (word >> 24) as u32 }
            }
        }
    };
}

name!(
    /// A name for an endpoint.
    EndpointRef
);
name!(
    /// A name for an epoll instance.
    EpollRef
);
