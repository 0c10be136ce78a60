//! The builtin services between existing programs: Apache Thrift's compiler and libraries for
//! Python, C++ and Java, memcached with libmemcached and pymemcache, Redis with its tools and
//! redis-py. Needs root.

#[path = "serve_peers/cache.rs"]
mod cache;
mod common;
#[path = "serve_peers/process.rs"]
mod process;
#[path = "serve_peers/thrift.rs"]
mod thrift;
