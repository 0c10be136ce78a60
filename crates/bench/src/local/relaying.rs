//! What the KTCP paper has of a relay's threads and buffers.

use std::time::Duration;

use anyhow::{Context, Result};

use super::Group;
use super::pair::listen_at;
use super::point::{Load, Point, Sample};
use super::synthetic::Calls;
use super::tables::{Table, Unit, bytes};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::{BEGIN, Call, Measured, READY};

/// All of them. shunt has no part in it.
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
/// From the paper's first one to what a pipe of shunt relay holds.
const BUFFERS: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// That the sender writes.
const MESSAGE: usize = 64 << 10;
const LIMIT: Duration = Duration::from_secs(30);

/// A sender, a relay with a thread for each direction, and a receiver.
#[derive(Clone, Copy, Debug)]
struct Forwarded {
    buffer: usize,
    splice: bool,
}

impl Load for Forwarded {
    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let at = listen_at(stage, side, Placement::Free)?;
        let start = |role, arguments: &[&str]| {
            let mut command = stage.worker(side, role, Placement::Free)?;
            Process::spawn_with_lines(command.args(arguments), arguments[0])
        };
        let size = MESSAGE.to_string();
        let mut sink = start(Role::Server, &["sink", "--at", &at, "--size", &size])?;
        let far = sink.expect(READY, LIMIT)?;
        let buffer = self.buffer.to_string();
        let mut arguments = vec!["forward", "--at", &at, "--to", &far, "--buffer", &buffer];
        arguments.extend(self.splice.then_some("--splice"));
        let mut relay = start(Role::Server, &arguments)?;
        let near = relay.expect(READY, LIMIT)?;
        let time = seconds.as_secs_f64().to_string();
        let mut source =
            start(Role::Client, &["stream", "--to", &near, "--size", &size, "--seconds", &time])?;
        source.expect(BEGIN, LIMIT)?;
        let (relay_before, source_before) = (relay.cpu(), source.cpu());
        let line = source.line(seconds + LIMIT)?;
        let relay_cpu = relay.cpu().saturating_sub(relay_before);
        let source_cpu = source.cpu().saturating_sub(source_before);
        let measured: Measured =
            serde_json::from_str(&line).with_context(|| format!("the sender said {line:?}"))?;
        [source, relay, sink].into_iter().try_for_each(Process::finish)?;
        Ok(Sample::of(&measured, relay_cpu, source_cpu))
    }
}
