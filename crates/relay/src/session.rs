//! One connection from its beginning to its end: what came is moved to what it is for, and each side learns how the other
//! ended: by an end of its stream, or by a reset after everything before it.

use std::os::fd::AsFd;
use std::pin::pin;
use std::time::Duration;

use socket2::SockRef;
use tokio::time::{Instant, sleep};

use crate::config::{Config, DataPath};
use crate::dial::Onward;
use crate::frame::{Verdict, decode_reply, encode_reply};
use crate::metrics::Metrics;
use crate::pump::{Broken, one_way};
use crate::record::{Flow, Record};
use crate::shared::Shared;
use crate::wire::Wire;

/// Where a connection comes from.
#[derive(Debug)]
pub(crate) enum Inward {
    /// Somebody who does not know of relays.
    Client(Wire),
    /// A relay, which wants to know how it went.
    Relay(Wire),
}

/// A connection's life from when it has come: it is answered, moved, counted and logged. `onward` becomes the way to its target.
pub(crate) async fn serve(
    shared: &Shared,
    config: &Config,
    inward: Inward,
    onward: impl Future<Output = Result<Onward, Verdict>>,
    record: &Record,
    mode: &'static str,
) {
    let onward = onward.await;
    record.note(&record.phases.dialed);
    let verdict = match onward {
        Ok(onward) => run(inward, onward, config.data, record, &shared.metrics).await,
        Err(verdict) => {
            inward.refuse(verdict).await;
            verdict
        }
    };
    shared.metrics.count(record.via.as_deref(), mode, verdict);
    if config.log_connections {
        record.log(verdict);
    }
}

/// Moves everything, both ways, until both have ended or one is broken. Says what became of it at first.
async fn run(inward: Inward, onward: Onward, path: DataPath, record: &Record, metrics: &Metrics) -> Verdict {
    let (inner, outer) = (inward.wire(), onward.wire());
    // If this process is killed, what it had not passed on must not look like an end.
    reset(inner);
    reset(outer);
    let up = move_all(inner, outer, path, &record.up);
    let down = async {
        if let Onward::Relay(relay) = &onward {
            let verdict = relay.read_exact().await.map(decode_reply);
            match verdict.map_err(|_| Stop::Broken(Broken::From))? {
                Ok(Verdict::Connected) => {}
                Ok(verdict) => return Err(Stop::Refused(verdict)),
                Err(_) => return Err(Stop::Refused(Verdict::NoRelay)),
            }
        }
        record.note(&record.phases.answered);
        metrics.set_up(record.via.as_deref(), record.age());
        inward.confirm().await.map_err(|_| Stop::Broken(Broken::To))?;
        move_all(outer, inner, path, &record.down).await
    };
    let (upward, downward) = both(up, down).await;
    if let Some(Err(Stop::Refused(verdict))) = downward {
        inward.refuse(verdict).await;
        return verdict;
    }
    let broke =
        |direction: &Ended, which: Broken| matches!(direction, Some(Err(Stop::Broken(it))) if *it == which);
    let inner_broke = broke(&upward, Broken::From) || broke(&downward, Broken::To);
    let outer_broke = broke(&upward, Broken::To) || broke(&downward, Broken::From);
    if inner_broke || outer_broke {
        await_arrival(inner, !inner_broke).await;
        await_arrival(outer, !outer_broke).await;
    } else {
        close(inner);
        close(outer);
    }
    Verdict::Connected
}

impl Inward {
    /// There is nothing to be had.
    pub(crate) async fn refuse(&self, verdict: Verdict) {
        match self {
            Inward::Client(wire) => reset(wire),
            // If it is gone, it does not matter any more.
            Inward::Relay(wire) => drop(wire.write_all(&encode_reply(verdict)).await),
        }
    }

    async fn confirm(&self) -> std::io::Result<()> {
        match self {
            Inward::Client(_) => Ok(()),
            Inward::Relay(wire) => wire.write_all(&encode_reply(Verdict::Connected)).await,
        }
    }

    pub(crate) fn wire(&self) -> &Wire {
        match self {
            Inward::Client(wire) | Inward::Relay(wire) => wire,
        }
    }
}

impl Onward {
    fn wire(&self) -> &Wire {
        match self {
            Onward::Target(wire) | Onward::Relay(wire) => wire,
        }
    }
}

/// Why a direction came to no good end.
#[derive(Debug)]
enum Stop {
    Broken(Broken),
    Refused(Verdict),
}

/// How a direction ended, if it has.
type Ended = Option<Result<(), Stop>>;

/// One direction with its end.
async fn move_all(from: &Wire, to: &Wire, path: DataPath, flow: &Flow) -> Result<(), Stop> {
    one_way(from, to, path, flow).await.map_err(Stop::Broken)?;
    // It may have been closed meanwhile: then there is nobody to be told.
    let _ = to.end().await;
    Ok(())
}

/// Until both have ended, or one so that the other has nobody left to give its bytes to. A socket that takes no more
/// may still have something to say.
async fn both(
    up: impl Future<Output = Result<(), Stop>>,
    down: impl Future<Output = Result<(), Stop>>,
) -> (Ended, Ended) {
    let (mut up, mut down) = (pin!(up), pin!(down));
    let (mut upward, mut downward) = (None, None);
    let is_over = |ended: &Ended| matches!(ended, Some(Err(Stop::Refused(_) | Stop::Broken(Broken::From))));
    while (upward.is_none() || downward.is_none()) && !is_over(&upward) && !is_over(&downward) {
        tokio::select! {
            ended = &mut up, if upward.is_none() => upward = Some(ended),
            ended = &mut down, if downward.is_none() => downward = Some(ended),
        }
    }
    (upward, downward)
}

/// How long what was sent before a reset may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

/// What it was sent arrives before it is reset, if it is alive: the bytes before a reset are not the reset's.
async fn await_arrival(wire: &Wire, is_alive: bool) {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = Duration::from_millis(1);
    let waits = || shunt_sys::tcp::outq(wire.stream().as_fd()).is_ok_and(|bytes| bytes > 0);
    while is_alive && waits() && Instant::now() < deadline {
        sleep(pause).await;
        pause = (2 * pause).min(Duration::from_millis(50));
    }
}

/// It is reset when it is closed, whoever closes it.
fn reset(wire: &Wire) {
    let _ = SockRef::from(wire.stream()).set_linger(Some(Duration::ZERO));
}

/// Its stream has ended as it should: the kernel delivers what is left.
fn close(wire: &Wire) {
    let _ = SockRef::from(wire.stream()).set_linger(None);
}
