//! The epoll instances that the program has, and the threads that wait in them.
//!
//! The kernel reports events to such a thread without the library. So the library uses an instance
//! for lanes only when each of these threads has come back to it (`Inner::native_waits` in the
//! library).

use std::collections::BTreeSet;
use std::ops::Range;

use shunt_abi::plan::NO_MORE;
use shunt_sys::proc::Fields;
use shunt_sys::trace;

use crate::Refusal;
use crate::others::{Kind, Others};
use crate::process::Process;

const POLL: i64 = 7;
const SELECT: i64 = 23;
const EPOLL_WAIT: i64 = 232;
const PSELECT6: i64 = 270;
const PPOLL: i64 = 271;
const EPOLL_PWAIT: i64 = 281;
const EPOLL_PWAIT2: i64 = 441;

/// An epoll instance of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    pub(crate) fd: i32,
    /// Another descriptor, another instance or another process may have it.
    pub(crate) may_be_shared: bool,
    /// The threads that may wait in it.
    pub(crate) waits: BTreeSet<i32>,
}

/// Lists the epoll instances among the descriptors that the stopped program has.
pub(crate) fn list(process: &Process, held: &[(i32, Kind)], others: &Others) -> Vec<Instance> {
    let fds: Vec<i32> = held.iter().filter(|(_, kind)| *kind == Kind::Instance).map(|(fd, _)| *fd).collect();
    let lists: Vec<Vec<i32>> = fds.iter().map(|fd| registered(process.pid, *fd)).collect();
    let own = fds.iter().map(|fd| (process.pid, *fd));
    let all: Vec<(i32, i32)> = own.chain(others.instances.iter().copied()).collect();
    let is_same = |fd: i32, other| trace::is_same_file((process.pid, fd), other).unwrap_or(true);
    let is_shared = |fd: i32| all.iter().any(|other| *other != (process.pid, fd) && is_same(fd, *other));
    let instances = fds.iter().zip(&lists).map(|(fd, listed)| Instance {
        fd: *fd,
        may_be_shared: lists.iter().any(|list| list.contains(fd))
            || listed.iter().any(|one| fds.contains(one))
            || is_shared(*fd),
        waits: BTreeSet::new(),
    });
    instances.collect()
}

/// Returns the fds that are registered with an instance.
fn registered(pid: i32, fd: i32) -> Vec<i32> {
    let Ok(fields) = Fields::descriptor(pid, fd) else { return Vec::new() };
    let lines = fields.text().lines().filter_map(|line| line.strip_prefix("tfd:"));
    lines.filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
}

/// Notes that a thread is in a system call.
pub(crate) fn note_call(
    process: &Process,
    instances: &mut [Instance],
    thread: i32,
    (number, arguments): (i64, [u64; 6]),
) -> Result<(), Refusal> {
    match number {
        EPOLL_WAIT | EPOLL_PWAIT | EPOLL_PWAIT2 => {
            let fd = arguments[0] as i32;
            note(instances, thread, |one| one == fd);
        }
        POLL | PPOLL => {
            const MOST: u64 = 1 << 16;
            let [list, count, ..] = arguments;
            if instances.is_empty() {
                return Ok(());
            }
            let mut entries = vec![0; 8 * count.min(MOST) as usize];
            process.read(list, &mut entries)?;
            let fds: BTreeSet<i32> = entries
                .chunks_exact(8)
                .map(|entry| i32::from_ne_bytes(entry[..4].try_into().expect("four bytes")))
                .collect();
            note(instances, thread, |one| count > MOST || fds.contains(&one));
        }
        SELECT | PSELECT6 => note(instances, thread, |one| (one as u64) < arguments[0]),
        _ => {}
    }
    Ok(())
}

fn note(instances: &mut [Instance], thread: i32, is_it: impl Fn(i32) -> bool) {
    for one in instances.iter_mut().filter(|one| is_it(one.fd)) {
        one.waits.insert(thread);
    }
}

/// Returns whether a thread is about to begin a wait: it runs one of the `functions` that wait, or
/// a function that one of these has called.
pub(crate) fn is_about_to_wait(process: &Process, functions: &[Range<u64>], rip: u64, rsp: u64) -> bool {
    let is_in = |at: u64| functions.iter().any(|range| range.contains(&at));
    is_in(rip) || process.words::<6>(rsp).is_ok_and(|words| words.into_iter().any(is_in))
}

/// Returns the words in which the library reads the instances.
pub(crate) fn describe(instances: &[Instance]) -> Vec<u64> {
    let mut words = Vec::new();
    for one in instances {
        words.extend([one.fd as u64, one.may_be_shared.into(), one.waits.len() as u64]);
        words.extend(one.waits.iter().map(|thread| *thread as u64));
    }
    words.push(NO_MORE);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_described_one_after_the_other() {
        let instance = |fd, waits: &[i32]| Instance {
            fd,
            may_be_shared: fd == 7,
            waits: waits.iter().copied().collect(),
        };
        assert_eq!(describe(&[]), [NO_MORE]);
        let words = describe(&[instance(5, &[9, 8]), instance(7, &[])]);
        assert_eq!(words, [5, 0, 2, 8, 9, 7, 1, 0, NO_MORE]);
    }

    #[test]
    fn wait_of_a_thread_counts_for_its_instance() {
        let mut instances: Vec<Instance> =
            [5, 9].map(|fd| Instance { fd, may_be_shared: false, waits: BTreeSet::new() }).into();
        note(&mut instances, 3, |fd| fd == 9);
        note(&mut instances, 4, |_| true);
        assert_eq!(instances[0].waits, [4].into());
        assert_eq!(instances[1].waits, [3, 4].into());
    }
}
