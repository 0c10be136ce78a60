//! One relayed connection from its start to its end.
//!
//! Each side sees how the other one ended: with an end of its stream, or with a reset. A reset is
//! sent after all bytes before it have arrived.

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

/// The accepted side of a connection.
#[derive(Debug)]
pub(crate) enum Inward {
    /// A client, which does not know of relays.
    Client(Wire),
    /// A relay, which expects a verdict.
    Relay(Wire),
}

/// Serves an accepted connection: answers it, moves its bytes, counts and logs it. `onward`
/// connects to its target.
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

/// Moves bytes in both directions until both have ended or one is broken. Returns the verdict on
/// the set-up of the connection.
async fn run(inward: Inward, onward: Onward, path: DataPath, record: &Record, metrics: &Metrics) -> Verdict {
    let (inner, outer) = (inward.wire(), onward.wire());
    // If this process is killed, the kernel must reset the connections. An orderly end would hide
    // that bytes are missing.
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
    /// Rejects the connection.
    pub(crate) async fn refuse(&self, verdict: Verdict) {
        match self {
            Inward::Client(wire) => reset(wire),
            // A failed write means that the relay is gone.
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

/// Why a direction ended prematurely.
#[derive(Debug)]
enum Stop {
    Broken(Broken),
    Refused(Verdict),
}

/// How a direction ended, if it has.
type Ended = Option<Result<(), Stop>>;

/// Moves the bytes of one direction, and passes on the end of its stream.
async fn move_all(from: &Wire, to: &Wire, path: DataPath, flow: &Flow) -> Result<(), Stop> {
    one_way(from, to, path, flow).await.map_err(Stop::Broken)?;
    // The other side may have closed the connection meanwhile, so that it needs no end of the
    // stream.
    let _ = to.end().await;
    Ok(())
}

/// Runs both directions until both have ended, or one has failed in a way that makes the other
/// pointless.
///
/// A socket that accepts no more bytes may still deliver some, so a failed write does not end the
/// other direction.
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

/// How long bytes that were sent before a reset may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until the peer has acknowledged all bytes that were sent, if it is alive. A reset would
/// discard them.
async fn await_arrival(wire: &Wire, is_alive: bool) {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = Duration::from_millis(1);
    let waits = || shunt_sys::tcp::outq(wire.stream().as_fd()).is_ok_and(|bytes| bytes > 0);
    while is_alive && waits() && Instant::now() < deadline {
        sleep(pause).await;
        pause = (2 * pause).min(Duration::from_millis(50));
    }
}

/// Makes the kernel reset the connection when it is closed, even if the process is killed.
fn reset(wire: &Wire) {
    let _ = SockRef::from(wire.stream()).set_linger(Some(Duration::ZERO));
}

/// Makes the kernel deliver the remaining bytes when the connection is closed.
fn close(wire: &Wire) {
    let _ = SockRef::from(wire.stream()).set_linger(None);
}
