//! Changes limits and priorities of connections in use, in any process, without their descriptors.

use std::collections::{BTreeMap, HashMap as Table};

use aya::maps::{HashMap, MapData};
use aya::programs::Iter;
use aya::{Btf, Ebpf};

use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/shape.bpf.o"));
const PROGRAM: &str = "shape";

/// `struct shape` of shape.bpf.c.
type Value = [u32; 5];
/// The value in it for no limit, and for an option that is kept.
const NONE: u32 = u32::MAX;
/// Its outcomes. An error is added to the last one.
const NOT_FOUND: u32 = 0;
const CHANGED: u32 = 1;
const REFUSED: u32 = 2;

/// The options to set on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The most bytes per second that it sends (SO_MAX_PACING_RATE).
    pub rate: Option<u32>,
    /// IP_TOS, or `None` to keep it. Some kernels reject it for IPv6 sockets, whatever their
    /// addresses.
    pub tos: Option<u8>,
    /// IPV6_TCLASS, or `None` to keep it.
    pub traffic_class: Option<u8>,
    /// SO_PRIORITY.
    pub priority: u32,
}

/// The outcome of a change, for each of the sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The number of sockets with the new options.
    pub changed: usize,
    /// The number of sockets that were not there any more.
    pub gone: usize,
    /// The errors of sockets that keep at least one of their options, each with their number.
    pub refused: BTreeMap<i32, usize>,
}

/// The loaded program, and its map of the changes to make.
#[derive(Debug)]
pub struct Shaper {
    loaded: Ebpf,
}

impl Shaper {
    /// Loads the program, which is unloaded on drop.
    pub fn load() -> Result<Shaper, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        let types = Btf::from_sys_fs().map_err(refusal)?;
        load::program::<Iter>(&mut loaded, PROGRAM).load("tcp", &types).map_err(refusal)?;
        Ok(Shaper { loaded })
    }

    /// Changes sockets of this thread's network namespace, selected by their SO_COOKIE.
    ///
    /// The program waits for the lock of every socket of the namespace, and so for every call that
    /// holds one.
    pub fn change(&mut self, wanted: &Table<u64, Shape>) -> Result<Outcome, LoadError> {
        let mut shapes = self.shapes()?;
        for (cookie, shape) in wanted {
            shapes.insert(cookie, value(shape), 0).map_err(refusal)?;
        }
        let visited = load::visit_sockets(load::program(&mut self.loaded, PROGRAM)).map_err(refusal);
        let mut shapes = self.shapes()?;
        let mut outcome = Outcome::default();
        for cookie in wanted.keys() {
            let [.., one] = shapes.get(cookie, 0).map_err(refusal)?;
            match one {
                NOT_FOUND => outcome.gone += 1,
                CHANGED => outcome.changed += 1,
                refused => *outcome.refused.entry((refused - REFUSED) as i32).or_default() += 1,
            }
            shapes.remove(cookie).map_err(refusal)?;
        }
        visited.map(|()| outcome)
    }

    fn shapes(&mut self) -> Result<HashMap<&mut MapData, u64, Value>, LoadError> {
        self.loaded.map_mut("shapes").expect("in the object").try_into().map_err(refusal)
    }
}

fn value(shape: &Shape) -> Value {
    let class = |class: Option<u8>| class.map_or(NONE, u32::from);
    [shape.rate.unwrap_or(NONE), class(shape.tos), class(shape.traffic_class), shape.priority, 0]
}
