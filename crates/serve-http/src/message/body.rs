//! Finds the end of a body in the bytes that arrive, and which of them are forwarded.

use super::chunked::Chunked;
use super::fields::Framing;

/// A chunked body is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadBody;

/// A body of which a part has been forwarded.
#[derive(Debug)]
pub enum Body {
    /// Nothing is left of it.
    Done,
    /// So many bytes are left.
    Length(u64),
    /// It is chunked.
    Chunked(Box<Chunked>),
    /// It ends with the connection.
    UntilClose,
}

/// The result of [`Body::pass`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// So many bytes at the beginning of the input belonged to the body.
    pub taken: usize,
    /// So many bytes at its beginning are to be forwarded now.
    pub kept: usize,
}

impl Body {
    /// Returns a body that has not begun. If `decodes`, chunks are forwarded as their content only.
    pub fn new(framing: Framing, decodes: bool) -> Body {
        match framing {
            Framing::None | Framing::Length(0) => Body::Done,
            Framing::Length(length) => Body::Length(length),
            Framing::Chunked => Body::Chunked(Box::new(Chunked::new(decodes))),
            Framing::UntilClose => Body::UntilClose,
        }
    }

    /// Returns true if no more bytes belong to the body.
    pub fn is_done(&self) -> bool {
        matches!(self, Body::Done)
    }

    /// Takes the body's bytes from the beginning of `input`, and moves those that are forwarded to
    /// its beginning. `tail` gets bytes that follow them.
    pub fn pass(&mut self, input: &mut [u8], tail: &mut Vec<u8>) -> Result<Passed, BadBody> {
        let passed = match self {
            Body::Done => Passed::default(),
            Body::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                *left -= taken as u64;
                Passed { taken, kept: taken }
            }
            Body::Chunked(chunked) => chunked.pass(input, tail)?,
            Body::UntilClose => Passed { taken: input.len(), kept: input.len() },
        };
        self.settle();
        Ok(passed)
    }

    /// Returns how many of the next bytes are forwarded unchanged, whatever they are.
    pub fn plain(&self) -> u64 {
        match self {
            Body::Done => 0,
            Body::Length(left) => *left,
            Body::Chunked(chunked) => chunked.plain(),
            Body::UntilClose => u64::MAX,
        }
    }

    /// Takes bytes of [`Body::plain`] that were forwarded elsewhere.
    pub fn skip(&mut self, bytes: u64) {
        match self {
            Body::Length(left) => *left -= bytes,
            Body::Chunked(chunked) => chunked.skip(bytes),
            Body::Done | Body::UntilClose => {}
        }
        self.settle();
    }

    fn settle(&mut self) {
        let is_done = match self {
            Body::Length(left) => *left == 0,
            Body::Chunked(chunked) => chunked.is_done(),
            Body::Done | Body::UntilClose => return,
        };
        if is_done {
            *self = Body::Done;
        }
    }
}
