//! Replacement for `open` on processors that are not supported.

use std::path::Path;

use crate::{By, Closed};

/// A value of this type cannot exist.
pub enum Interception {}

/// Fails with [`Closed::Processor`].
pub fn wait(_: By) -> Result<(), Closed> {
    Err(Closed::Processor)
}

impl Interception {
    /// Fails with [`Closed::Processor`].
    pub fn plan(_: &Path, _: &Path) -> Result<Interception, Closed> {
        Err(Closed::Processor)
    }

    /// Returns `false`.
    pub fn is_needed(_: &Path, _: &Path) -> Result<bool, Closed> {
        Ok(false)
    }

    /// Cannot be called, because there is no `Interception`.
    pub fn open(self) -> Result<(), Closed> {
        match self {}
    }
}
