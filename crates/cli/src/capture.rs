//! `shunt capture`: writes connections on shared memory as packets.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::geteuid;
use shunt_capture::{Filter, Limits, Session, Summary};

use crate::args::CaptureArgs;
use crate::{daemon, status};

/// The size of the output buffer.
const BUFFER: usize = 1 << 20;
/// How long the capture may take to finish after its end. The reader of its output may have stopped
/// reading.
const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &CaptureArgs) -> Result<()> {
    let broker = status::find(args.broker.as_deref())?;
    let to = output(args)?;
    let time = args.seconds.map(Duration::from_secs);
    let limits = Limits { packets: args.count, bytes: args.bytes, time, snaplen: args.snaplen };
    let filter = Filter {
        ports: args.port.clone(),
        addresses: args.address.clone(),
        pids: args.pid.clone(),
        programs: args.program.clone(),
    };
    let stop = stopped()?;
    let to = BufWriter::with_capacity(BUFFER, to);
    let session = Session::open(&broker, filter, limits, to, |complaint| eprintln!("shunt: {complaint}"))?;
    if let Some(time) = time {
        thread::spawn(move || give_up_after(time));
    }
    // Messages go to standard error, because standard output carries the packets.
    match session.is_of_all() {
        true => eprintln!("shunt: capturing all connections that are on shared memory"),
        false if geteuid().is_root() => eprintln!(
            "shunt: capturing connections between your own programs only: this broker is another user's, or this is no root of the host"
        ),
        false => eprintln!("shunt: capturing connections between your own programs"),
    }
    let (summary, gone) = session.run(|| stop.load(Relaxed))?;
    eprintln!("shunt: {}", line(&summary));
    match gone {
        Some(gone) => Err(gone.into()),
        None => Ok(()),
    }
}

fn output(args: &CaptureArgs) -> Result<Box<dyn Write>> {
    if let Some(path) = args.write.as_deref().filter(|path| path.as_os_str() != "-") {
        let file = File::create(path).with_context(|| format!("cannot write to {}", path.display()))?;
        return Ok(Box::new(file));
    }
    let stdout = std::io::stdout();
    if stdout.is_terminal() {
        bail!(
            "packets are nothing for a terminal: `shunt capture -w FILE`, or `shunt capture | tshark -r -`"
        );
    }
    Ok(Box::new(stdout))
}

/// Returns a flag that is set when SIGINT or SIGTERM arrives.
fn stopped() -> Result<Arc<AtomicBool>> {
    let stopped = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.context("signals cannot be waited for")?;
    let signals = {
        let _inside = runtime.enter();
        daemon::shutdown().context("signals cannot be waited for")?
    };
    let word = stopped.clone();
    thread::spawn(move || {
        runtime.block_on(signals);
        word.store(true, Relaxed);
        give_up_after(Duration::ZERO);
    });
    Ok(stopped)
}

/// Ends the process if the capture still runs `PATIENCE` after it should have ended. It should end
/// after `time`.
fn give_up_after(time: Duration) {
    thread::sleep(time.saturating_add(PATIENCE));
    eprintln!(
        "shunt: the capture ends without its last packets: nobody reads what it writes, or the disk is too slow"
    );
    std::process::exit(1);
}

fn line(summary: &Summary) -> String {
    let Summary { packets, bytes, connections, gaps, missed, spoiled, unfinished } = summary;
    let mut line = format!("{packets} packets, {bytes} bytes of {connections} connections; ");
    line += &match gaps {
        0 => "nothing was missed".to_owned(),
        _ => format!("{missed} bytes were missed, in {gaps} gaps"),
    };
    if *spoiled > 0 {
        line += &format!("; {spoiled} directions were given up, as their programs wrote what cannot be");
    }
    if *unfinished > 0 {
        line += &format!("; the end of {unfinished} connections was left out, as it ended in a hurry");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_missed_is_said() {
        let mut summary = Summary { packets: 2, bytes: 300, connections: 1, ..Summary::default() };
        assert_eq!(line(&summary), "2 packets, 300 bytes of 1 connections; nothing was missed");
        summary.gaps = 3;
        summary.missed = 4096;
        summary.spoiled = 1;
        assert!(line(&summary).contains("4096 bytes were missed, in 3 gaps; 1 directions were given up"));
        summary.unfinished = 2;
        assert!(line(&summary).ends_with("; the end of 2 connections was left out, as it ended in a hurry"));
    }
}
