//! The cache.

mod items;
pub(crate) mod memory;
mod numbers;
