//! Measures the time in each system call for messages of the article's size, in an extra turn of
//! each way with a tracer in the kernel. The article used strace, which costs more than the calls.

use anyhow::Result;
use serde::Serialize;
use shunt_kernel::calls::{Call, Calls};

use super::article;
use super::turn::{ONE_WAY, Place, Turn};
use shunt_bench_args::ipc::Way;

/// The messages of the turn.
const MESSAGES: u64 = 2_000;

/// The traced calls, or the reason why there are none.
#[derive(Debug, Serialize)]
pub(super) struct Traced {
    pub(super) missing: Option<String>,
    pub(super) ways: Vec<WayCalls>,
}

/// The system calls of a way's two processes.
#[derive(Debug, Serialize)]
pub(super) struct WayCalls {
    pub(super) way: Way,
    pub(super) sender: Vec<CallFigures>,
    pub(super) receiver: Vec<CallFigures>,
}

/// The figures of one system call.
#[derive(Debug, Serialize)]
pub(super) struct CallFigures {
    pub(super) name: String,
    /// Calls for each message.
    pub(super) count: f64,
    pub(super) mean_us: f64,
    pub(super) median_us: f64,
    /// The article's figure, from strace.
    pub(super) article_us: Option<f64>,
}

impl Traced {
    pub(super) fn measure(place: &Place, ways: &[Way], descriptors: usize) -> Result<Traced> {
        let mut calls = match Calls::attach() {
            Ok(calls) => calls,
            Err(error) => return Ok(Traced { missing: Some(error.to_string()), ways: Vec::new() }),
        };
        let mut found = Vec::new();
        for way in ways {
            let turn = Turn { exchange: ONE_WAY, way: *way, size: article::SIZE, descriptors };
            let mut pair = place.start(turn, MESSAGES, |process| Ok(calls.watch(process.id())?))?;
            if pair.finish()?.is_none() {
                continue;
            }
            let of = |process: u32, is_sender: bool| -> Result<Vec<CallFigures>> {
                let calls = calls.of(process)?;
                // Leave out calls of the start-up and of a few messages.
                let often = calls.iter().filter(|call| call.count >= MESSAGES / 20);
                Ok(often.map(|call| CallFigures::of(*way, is_sender, call)).collect())
            };
            found.push(WayCalls {
                way: *way,
                sender: of(pair.sender.id(), true)?,
                receiver: of(pair.receiver.id(), false)?,
            });
        }
        Ok(Traced { missing: None, ways: found })
    }
}

impl CallFigures {
    fn of(way: Way, is_sender: bool, call: &Call) -> CallFigures {
        let name = name(call.number);
        CallFigures {
            count: call.count as f64 / (MESSAGES + MESSAGES / 10) as f64,
            mean_us: call.mean / 1e3,
            median_us: call.median / 1e3,
            article_us: article::call(way, is_sender, &name),
            name,
        }
    }
}

/// Returns the call's name in strace.
fn name(number: u32) -> String {
    let known = [
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_openat, "openat"),
        (libc::SYS_unlinkat, "unlinkat"),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_unlink, "unlink"),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_poll, "poll"),
        (libc::SYS_ppoll, "ppoll"),
        (libc::SYS_write, "write"),
        (libc::SYS_read, "read"),
        (libc::SYS_lseek, "lseek"),
        (libc::SYS_close, "close"),
        (libc::SYS_memfd_create, "memfd_create"),
        (libc::SYS_fcntl, "fcntl"),
        (libc::SYS_futex, "futex"),
        (libc::SYS_sched_yield, "sched_yield"),
        (libc::SYS_epoll_pwait2, "epoll_pwait2"),
        (libc::SYS_epoll_pwait, "epoll_pwait"),
        (libc::SYS_madvise, "madvise"),
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_munmap, "munmap"),
        (libc::SYS_brk, "brk"),
    ];
    let found = known.iter().find(|(other, _)| *other == i64::from(number));
    found.map_or_else(|| format!("call {number}"), |(_, name)| (*name).to_owned())
}
