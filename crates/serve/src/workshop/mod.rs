//! Tools for the authors of services: a template, the build, and the test vectors.

mod build;
mod state;
mod template;
pub mod vectors;

pub use build::{BuildError, build};
pub use state::{Unshared, check_state};
pub use template::{NewError, Template, new};
