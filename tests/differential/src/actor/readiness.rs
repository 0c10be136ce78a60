//! Calls of poll, select and epoll by an actor.

use super::calls::Answer;
use crate::actor::past::either;
use crate::actor::{IS_RAW, fd, memory, unseen};
use crate::script::{ENOUGH, EPOLL_CALLS, POLL_CALLS, Step};
use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

#[cfg(not(target_env = "musl"))]
unsafe extern "C" {
    fn epoll_pwait2(
        set: c_int,
        events: *mut libc::epoll_event,
        room: c_int,
        limit: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// Calls epoll_pwait2 as a system call: musl has no function for it before 1.2.6.
///
/// # Safety
/// As the system call.
#[cfg(target_env = "musl")]
unsafe fn epoll_pwait2(
    set: c_int,
    events: *mut libc::epoll_event,
    room: c_int,
    limit: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_epoll_pwait2, set, events, room, limit, mask, MASK_BYTES) as c_int }
}

/// Bytes of the kernel's signal mask.
const MASK_BYTES: usize = 8;

fn time(millis: i64) -> libc::timespec {
    libc::timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 }
}

/// Returns the descriptors of a poll, with the requested events.
fn asked(step: &Step) -> Vec<libc::pollfd> {
    [2, 4]
        .into_iter()
        .filter(|index| step.args[*index] >= 0)
        .map(|index| libc::pollfd {
            fd: fd(step.slot(index)),
            events: step.args[index + 1] as i16,
            revents: 0,
        })
        .collect()
}

/// Calls poll or a related function. The answer's `extra` contains the ready events of each
/// descriptor.
pub(super) fn poll(step: &Step) -> Answer {
    let call = POLL_CALLS[step.args[0] as usize];
    let millis = step.args[1];
    let mut fds = asked(step);
    let limit = time(millis.max(0));
    let limit: *const libc::timespec = if millis < 0 { null() } else { &limit };
    // SAFETY: the array has the length that is passed.
    let ret = unsafe {
        match call {
            "poll" => libc::poll(fds.as_mut_ptr(), fds.len() as u64, millis as c_int),
            "ppoll" => {
                let (array, count) = (fds.as_mut_ptr(), fds.len());
                // The kernel writes the remaining time there.
                let mut limit = if millis < 0 { None } else { Some(*limit) };
                let limit: *mut libc::timespec = limit.as_mut().map_or(null_mut(), |limit| limit);
                let by_libc = || libc::ppoll(array, count as u64, limit, null()).into();
                let arguments = [array as usize, count, limit as usize, 0, MASK_BYTES, 0];
                either(by_libc, libc::SYS_ppoll, arguments) as c_int
            }
            _ => return select(call, &fds, millis),
        }
    };
    Answer { extra: fds.iter().map(|one| one.revents.into()).collect(), ..Answer::of(ret.into()) }
}

fn select(call: &str, fds: &[libc::pollfd], millis: i64) -> Answer {
    let highest = fds.iter().map(|one| one.fd).max().unwrap_or(0);
    // SAFETY: the sets are initialised, and descriptors are below 1024.
    unsafe {
        let mut sets: [libc::fd_set; 3] = std::mem::zeroed();
        for one in fds {
            for (set, event) in sets.iter_mut().zip([libc::POLLIN, libc::POLLOUT, libc::POLLPRI]) {
                if one.events & event != 0 {
                    libc::FD_SET(one.fd, set);
                }
            }
        }
        let [read, write, except] = &mut sets;
        let limit = time(millis.max(0));
        let ret = if call == "select" {
            let mut limit = libc::timeval { tv_sec: limit.tv_sec, tv_usec: limit.tv_nsec / 1000 };
            let limit: *mut libc::timeval = if millis < 0 { null_mut() } else { &mut limit };
            libc::select(highest + 1, read, write, except, limit)
        } else {
            let limit: *const libc::timespec = if millis < 0 { null() } else { &limit };
            libc::pselect(highest + 1, read, write, except, limit, null())
        };
        let bits = |one: &libc::pollfd| {
            (0..3).filter(|set| libc::FD_ISSET(one.fd, &sets[*set])).map(|set| 1 << set).sum()
        };
        let extra = if ret < 0 { Vec::new() } else { fds.iter().map(bits).collect() };
        Answer { extra, ..Answer::of(ret.into()) }
    }
}

/// Calls epoll_ctl.
pub(super) fn control(step: &Step) -> Answer {
    let mut event = libc::epoll_event { events: step.args[3] as u32, u64: step.args[4] as u64 };
    if IS_RAW[step.slot(0)].load(Relaxed) {
        return unseen::answer(unseen::on_set(step, std::slice::from_mut(&mut event)), Vec::new());
    }
    let (set, operation, target) = (fd(step.slot(0)), step.args[1] as c_int, fd(step.slot(2)));
    let event: *mut libc::epoll_event = &mut event;
    let arguments = [set as usize, operation as usize, target as usize, event as usize, 0, 0];
    // SAFETY: an event on this stack.
    let by_libc = || unsafe { libc::epoll_ctl(set, operation, target, event) }.into();
    // SAFETY: as above.
    Answer::of(unsafe { either(by_libc, libc::SYS_epoll_ctl, arguments) })
}

/// A wait with a time-out that has taken this long has slept.
const SLEPT: Duration = Duration::from_micros(100);
/// The thread that woke the wait may take this long for the rest of its call. The wait does not
/// sleep meanwhile: the tester would take it for a blocked one.
const REST: Duration = Duration::from_micros(500);

/// Calls epoll_wait or a related function. The answer's `extra` contains pairs of data and events,
/// in the order of their reports.
///
/// If there is room for fewer events than there may be, the actor waits again until nothing new is
/// reported; each pair counts once. It does so after a sleep too. If one call of another thread
/// changes two sockets, their events come one after the other, with TCP as well, and the first may
/// wake the sleeper before the second.
pub(super) fn wait(step: &Step) -> Answer {
    let begin = Instant::now();
    let mut all = wait_once(step, step.args[2]);
    let places = step.args[1];
    let has_slept = all.ret > 0 && step.args[2] != 0 && begin.elapsed() >= SLEPT && !is_raw(step);
    if !has_slept && (places >= ENOUGH || all.ret < places) {
        return all;
    }
    let pairs = |extra: &[i64]| extra.chunks(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>();
    let mut told = pairs(&all.extra);
    let mut in_vain = 0;
    let until = has_slept.then(|| Instant::now() + REST);
    let has_time = || until.is_some_and(|until| Instant::now() < until);
    while in_vain < 2 + told.len() || has_time() {
        let next = wait_once(step, 0);
        let known = told.len();
        let new: Vec<_> = pairs(&next.extra).into_iter().filter(|pair| !told.contains(pair)).collect();
        told.extend(new);
        in_vain = if told.len() > known { 0 } else { in_vain + 1 };
        if next.ret <= 0 && !has_time() {
            break;
        }
        std::thread::yield_now();
    }
    all.ret = told.len() as i64;
    all.extra = told.into_iter().flat_map(|(data, events)| [data, events]).collect();
    all
}

/// Returns whether the epoll instance is one for waits past libc.
fn is_raw(step: &Step) -> bool {
    IS_RAW[step.slot(0)].load(Relaxed)
}

fn wait_once(step: &Step, millis: i64) -> Answer {
    let set = fd(step.slot(0));
    let most = (step.args[1] as usize).clamp(1, 16);
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
    if is_raw(step) {
        let ret = unseen::on_set(step, &mut events[..most]);
        return unseen::answer(ret, told(&events, ret));
    }
    let (array, room) = (events.as_mut_ptr(), most as c_int);
    let limit = time(millis.max(0));
    let limit: *const libc::timespec = if millis < 0 { null() } else { &limit };
    // SAFETY: the array has room for `room` events.
    let ret = unsafe {
        match EPOLL_CALLS[step.args[3] as usize] {
            "epoll_pwait" => libc::epoll_pwait(set, array, room, millis as c_int, null()),
            "epoll_pwait2" => epoll_pwait2(set, array, room, limit, null()),
            // The events cannot be written: the call fails, and they stay pending.
            "forbidden" => libc::epoll_wait(set, memory::forbidden().cast(), room, millis as c_int),
            _ => {
                let by_libc = || libc::epoll_wait(set, array, room, millis as c_int).into();
                let arguments = [set as usize, array as usize, room as usize, millis as usize, 0, MASK_BYTES];
                either(by_libc, libc::SYS_epoll_pwait, arguments) as c_int
            }
        }
    };
    let answer = Answer::of(ret.into());
    Answer { extra: told(&events, ret.into()), ..answer }
}

fn told(events: &[libc::epoll_event], count: i64) -> Vec<i64> {
    let found = events[..usize::try_from(count).unwrap_or(0)].iter();
    found.flat_map(|event| [event.u64 as i64, i64::from(event.events)]).collect()
}
