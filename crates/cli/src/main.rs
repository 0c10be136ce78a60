//! The command: shunt
fn main() {}
