//! The builtin services between programs that nobody here wrote: Apache Thrift's compiler and libraries for Python, C++
//! and Java. Needs root.

mod common;
#[path = "serve_peers/process.rs"]
mod process;
#[path = "serve_peers/thrift.rs"]
mod thrift;
