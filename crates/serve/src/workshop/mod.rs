//! Where services are made: a template to begin with, a file built of a source, and its tests.

mod build;
mod template;
pub mod vectors;

pub use build::{BuildError, build};
pub use template::{NewError, new};
