//! Tables from the KTCP paper, about a relay's threads and buffers.

use std::time::Duration;

use anyhow::Result;

use super::point::{Load, Point, Sample};
use super::synthetic::Calls;
use super::tables::{Table, Unit, bytes};
use super::{Group, pair};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::Call;

/// Returns the tables. shunt is not involved.
pub(super) fn tables() -> [Table; 2] {
    let calls = |label, call| Point::new(label, NATIVE, Calls(call));
    let threads = Table {
        group: Group::Relaying,
        title: "Switches between threads, and what there is instead".to_owned(),
        unit: Unit::Microseconds,
        axis: None,
        points: vec![
            calls("switch between two threads", Call::SwitchThreads),
            calls("switch between two processes", Call::SwitchProcesses),
            calls("epoll_wait with one ready", Call::EpollWait),
            calls("a pool's thread woken, and done", Call::Pool),
        ],
    };
    let forwarded = |splice, size| {
        let how = if splice { "spliced" } else { "copied" };
        let label = format!("{how}, {}", bytes(size));
        Point::new(label, NATIVE, Forwarded { buffer: size, splice }).of_bytes(MESSAGE)
    };
    let buffers = Table {
        group: Group::Relaying,
        title: "A stream through a relay with such buffers".to_owned(),
        unit: Unit::Megabytes,
        axis: None,
        points: [false, true].iter().flat_map(|how| BUFFERS.map(|size| forwarded(*how, size))).collect(),
    };
    [threads, buffers]
}

const NATIVE: &[Side] = &[Side::TcpNodelay];
/// Buffer sizes, from the paper's first one to that of shunt relay's pipes.
const BUFFERS: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// The bytes of each write of the sender.
const MESSAGE: usize = 64 << 10;

/// A sender, a relay with a thread for each direction, and a receiver.
#[derive(Clone, Copy, Debug)]
struct Forwarded {
    buffer: usize,
    splice: bool,
}

impl Load for Forwarded {
    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let at = pair::listen_at(stage, side, Placement::Free)?;
        let (size, buffer) = (MESSAGE.to_string(), self.buffer.to_string());
        let mut command = stage.worker(side, Role::Server, Placement::Free)?;
        command.args(["sink", "--at", &at, "--size", &size]);
        let (sink, far) = Process::serving(&mut command, "the receiver")?;
        let mut relay = stage.worker(side, Role::Server, Placement::Free)?;
        relay.args(["forward", "--at", &at, "--to", &far, "--buffer", &buffer]);
        relay.args(self.splice.then_some("--splice"));
        let source = |near: &str| {
            let mut command = stage.worker(side, Role::Client, Placement::Free)?;
            let time = seconds.as_secs_f64().to_string();
            command.args(["stream", "--to", near, "--size", &size, "--seconds", &time]);
            Ok(command)
        };
        let sample = pair::run(stage, side, &mut relay, source, seconds)?;
        sink.finish()?;
        Ok(sample)
    }
}
