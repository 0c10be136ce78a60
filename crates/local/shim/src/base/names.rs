//! Handles for objects that live in reusable slots. A handle consists of the slot's index and a
//! generation. A holder notices by the generation that its slot now contains another object.

/// Defines a handle: the index of a slot, and how often the slot had been reused.
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

            /// Returns the handle as an integer below 2^56.
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
    /// A handle of an endpoint.
    EndpointRef
);
name!(
    /// A handle of an epoll instance.
    EpollRef
);
