//! Processors on which no door is opened.

use std::path::Path;

use crate::{By, Closed};

/// There is none.
pub enum Door {}

/// Nobody is held still.
pub fn wait(_: By) -> Result<(), Closed> {
    Err(Closed::Processor)
}

impl Door {
    /// Says that there is none.
    pub fn plan(_: &Path, _: &Path) -> Result<Door, Closed> {
        Err(Closed::Processor)
    }

    /// None is.
    pub fn is_needed(_: &Path, _: &Path) -> Result<bool, Closed> {
        Ok(false)
    }

    /// Not on this processor.
    pub fn open(self) -> Result<(), Closed> {
        match self {}
    }
}
