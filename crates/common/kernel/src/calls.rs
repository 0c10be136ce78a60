//! Measures the system calls of selected processes in the kernel: count, mean and median of the
//! time from entry to return. strace reports the same at about a hundred times the cost.

use std::os::unix::fs::MetadataExt;

use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use aya::programs::RawTracePoint;

use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/calls.bpf.o"));

const BUCKETS: usize = 320;

/// `struct figures` of calls.bpf.c in 32-bit words: count and total of two words each, then the
/// buckets.
type Figures = [u32; 4 + BUCKETS];

/// The statistics of one system call of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The system call number on this architecture.
    pub number: u32,
    /// How many calls returned.
    pub count: u64,
    /// Mean time in nanoseconds.
    pub mean: f64,
    /// Median time in nanoseconds, with a relative error of up to an eighth.
    pub median: f64,
}

/// The attached programs. They are detached when this is dropped.
#[derive(Debug)]
pub struct Calls(Ebpf);

impl Calls {
    /// Loads and attaches the programs. No process is watched yet.
    pub fn attach() -> Result<Calls, LoadError> {
        let namespace = std::fs::metadata("/proc/self/ns/pid").map_err(refusal)?;
        let constants = [("namespace_device", namespace.dev()), ("namespace_inode", namespace.ino())];
        let mut loaded = load::load_with(OBJECT, &constants)?;
        for (name, point) in [("enter", "sys_enter"), ("leave", "sys_exit")] {
            let program: &mut RawTracePoint = load::program(&mut loaded, name);
            program.load().map_err(refusal)?;
            program.attach(point).map_err(refusal)?;
        }
        Ok(Calls(loaded))
    }

    /// Starts to time the calls of a process of this PID namespace.
    pub fn watch(&mut self, process: u32) -> Result<(), LoadError> {
        let map = self.0.map_mut("processes").expect("in the object");
        let mut processes: HashMap<&mut MapData, u32, u32> = map.try_into().map_err(refusal)?;
        processes.insert(process, 1, 0).map_err(refusal)
    }

    /// Returns the statistics of a process's calls so far.
    pub fn of(&self, process: u32) -> Result<Vec<Call>, LoadError> {
        let map = self.0.map("calls").expect("in the object");
        let calls: HashMap<&MapData, [u32; 2], Figures> = map.try_into().map_err(refusal)?;
        let mut found = Vec::new();
        for entry in calls.iter() {
            let ([owner, number], figures) = entry.map_err(refusal)?;
            if owner == process {
                found.push(Call::of(number, &figures));
            }
        }
        found.sort_by_key(|call| call.number);
        Ok(found)
    }
}

impl Call {
    fn of(number: u32, figures: &Figures) -> Call {
        let word = |at: usize| {
            let halves = [figures[at].to_ne_bytes(), figures[at + 1].to_ne_bytes()].concat();
            u64::from_ne_bytes(halves.try_into().expect("eight bytes"))
        };
        let (count, total) = (word(0), word(2));
        let mut before = 0;
        let middle = figures[4..].iter().position(|bucket| {
            before += u64::from(*bucket);
            before * 2 >= count
        });
        Call { number, count, mean: total as f64 / count.max(1) as f64, median: middle.map_or(0.0, value) }
    }
}

/// Returns the middle of a bucket.
fn value(bucket: usize) -> f64 {
    if bucket < 8 {
        return bucket as f64;
    }
    let (power, eighth) = (bucket / 8 + 2, bucket % 8);
    (8.0 + eighth as f64 + 0.5) * f64::powi(2.0, power as i32 - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_bucket_that_the_program_chose() {
        // 1000 = 2^9 * 1.95: power 9, eighth 7.
        assert_eq!(value((9 - 2) * 8 + 7), 15.5 * 64.0);
        assert_eq!((value(3), value(8)), (3.0, 8.5));
        let mut figures = [0; 4 + BUCKETS];
        let words = [3u64, 3000].map(u64::to_ne_bytes).concat();
        for (place, word) in figures.iter_mut().zip(words.chunks_exact(4)) {
            *place = u32::from_ne_bytes(word.try_into().unwrap());
        }
        (figures[4 + 63], figures[4 + 90]) = (2, 1);
        let call = Call::of(0, &figures);
        assert_eq!((call.count, call.mean, call.median), (3, 1000.0, 992.0));
    }
}
