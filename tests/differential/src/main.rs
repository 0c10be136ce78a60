//! Runs random sequences of socket operations on plain TCP and under shunt. Every return value,
//! errno, byte, readiness report and order that TCP defines must agree. See README.md in this
//! crate.

mod case;
mod generate;
mod judge;
mod late;
mod plugins;
mod processor;
mod run;
mod tally;
mod world;

use anyhow::{Context, Result};
use case::{Verdict, Worlds};
use clap::Parser;
use generate::Kind;
use processor::Processor;
use shunt_compat::{Ground, Host, Mode};
use shunt_differential::script::Sequence;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tally::Tally;
use world::Shim;

#[derive(Clone, Debug, Parser)]
#[command(about = "Compares random sequences of socket operations on TCP and under shunt")]
struct Args {
    /// How many sequences; without it as many as fit into the time.
    #[arg(long)]
    sequences: Option<u64>,
    /// The first sequence's number; the others follow it.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many sequences at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Stop after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Stop at so many differences.
    #[arg(long, default_value_t = 1)]
    differences: usize,
    /// The least share of sequences, in percent, that must have been on shared memory.
    #[arg(long, default_value_t = 50)]
    share: u64,
    /// Run this file, or all files of this directory, instead.
    #[arg(long)]
    replay: Option<PathBuf>,
    /// How often each file is replayed.
    #[arg(long, default_value_t = 1)]
    times: u32,
    /// Print what comes of every step of what is replayed, on TCP and under shunt.
    #[arg(long)]
    trace: bool,
    /// Run the sequence of every odd call instead.
    #[arg(long)]
    odd: bool,
    /// Short sequences, in which what programs seldom do is as likely as the rest. Fewer of them are on shared memory.
    #[arg(long)]
    rare: bool,
    /// Sequences in which many waits go past libc.
    #[arg(long, conflicts_with = "rare")]
    unseen: bool,
    /// Sequences that compare the order in which events of several connections are reported.
    #[arg(long, conflicts_with_all = ["rare", "unseen"])]
    order: bool,
    /// Sequences in which code becomes executable that calls the kernel past the shim.
    #[arg(long, conflicts_with_all = ["rare", "unseen", "order"])]
    past: bool,
    /// Sequences in which sets have sockets twice, by two numbers.
    #[arg(long, conflicts_with_all = ["rare", "unseen", "order", "past"])]
    twins: bool,
    /// Print the sequence of the seed, and no more.
    #[arg(long)]
    print: bool,
    /// Compare TCP with TCP: what differs then is the judge's fault.
    #[arg(long)]
    itself: bool,
    /// Have this build of this program be the actors, for musl or without a dynamic linker, started by `shunt run`.
    #[arg(long, value_name = "FILE")]
    actor: Option<PathBuf>,
    /// Write shrunk sequences here.
    #[arg(long)]
    keep: Option<PathBuf>,
}

impl Args {
    fn kind(&self) -> Kind {
        match self {
            Args { rare: true, .. } => Kind::Rare,
            Args { unseen: true, .. } => Kind::Unseen,
            Args { order: true, .. } => Kind::Order,
            Args { past: true, .. } => Kind::Past,
            Args { twins: true, .. } => Kind::Twins,
            _ => Kind::Any,
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.print {
        print!("{}", generate::sequence(args.seed, args.kind()));
        return ExitCode::SUCCESS;
    }
    let outcome = match &args.replay {
        Some(path) => read(path).and_then(|sequences| replay(&args, &sequences)),
        None if args.odd => replay(&args, &odd()),
        None => search(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Gives `work` two worlds on a separate host: a namespace and a broker, of which nothing is left
/// at the end.
fn on_host<T>(args: &Args, work: impl FnOnce(&mut Worlds) -> T) -> T {
    let ground = Arc::new(Ground::enter());
    if ground.is_isolated() {
        // Disable autocorking, so that no segment waits for another, and allow many ports.
        let _ = std::fs::write("/proc/sys/net/ipv4/tcp_autocorking", "0");
        let _ = std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "2000 65000");
    }
    let mode = if args.itself { Mode::Native } else { Mode::Shunt };
    let host = Host::new(mode, ground);
    let baseline = host.broker_descriptors();
    let shim = host.tools().map(|tools| Shim {
        library: tools.library.clone(),
        broker: host.broker_socket(),
        broker_pid: host.broker_pid(),
        command: tools.shunt.clone(),
    });
    let processor = Rc::new(Processor::choose().expect("a processor"));
    let mut worlds = Worlds::new(shim, args.actor.as_deref(), &processor);
    let result = work(&mut worlds);
    worlds.end();
    host.assert_broker_is_empty(baseline);
    host.finish();
    result
}

/// Compares random sequences. Returns `false` if there was a difference, or too little on shared
/// memory.
fn search(args: &Args) -> Result<bool> {
    let total = args.sequences.unwrap_or(if args.seconds.is_some() { u64::MAX } else { 1000 });
    let deadline = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let tally = Mutex::new(Tally::default());
    let work = |worlds: &mut Worlds| -> Result<()> {
        while !stop.load(Relaxed) && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            let number = next.fetch_add(1, Relaxed);
            if number >= total {
                break;
            }
            let seed = args.seed.wrapping_add(number);
            let sequence = generate::sequence(seed, args.kind());
            let verdict = worlds.compare(&sequence).with_context(|| format!("seed {seed}"))?;
            tally.lock().expect("no holder panics").add(&verdict);
            if let Some(what) = &verdict.difference {
                let found = examine(args, worlds, &sequence, seed, what)?;
                let mut tally = tally.lock().expect("no holder panics");
                tally.differences += usize::from(found);
                tally.unconfirmed += usize::from(!found);
                if tally.differences >= args.differences {
                    stop.store(true, Relaxed);
                }
            }
        }
        Ok(())
    };
    let begin = Instant::now();
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.jobs.max(1)).map(|_| scope.spawn(|| on_host(args, work))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a job panicked")).collect()
    });
    let tally = tally.into_inner().expect("no holder panics");
    println!("{} ({:.0} s)", tally, begin.elapsed().as_secs_f64());
    outcomes.into_iter().collect::<Result<()>>()?;
    let enough = args.itself || tally.share() >= args.share;
    if !enough {
        println!("that is too little on shared memory: at least {}% must be", args.share);
    }
    Ok(tally.differences == 0 && enough)
}

/// Number of times that a differing sequence is run again.
const AGAIN: u32 = 5;

/// Runs a differing sequence again. Returns in how many of `AGAIN` runs it differs, and how, unless
/// it does not differ any more or TCP differs from itself as well.
fn confirm(
    worlds: &mut Worlds,
    sequence: &Sequence,
    name: &str,
    first: &str,
) -> Result<Option<(u32, Verdict)>> {
    let (times, verdict) = worlds.confirm(sequence, AGAIN)?;
    if times == 0 {
        println!("{name} differed once and not in {AGAIN} more runs: {}", first.replace('\n', "\n#"));
        return Ok(None);
    }
    if worlds.control(sequence, 2 * AGAIN)? > 0 {
        println!("{name} differs on TCP alone as well: {}", first.replace('\n', "\n#"));
        return Ok(None);
    }
    Ok(Some((times, verdict)))
}

/// Runs a differing sequence again, and shortens it if it still differs. Returns `false` if it does
/// not.
fn examine(args: &Args, worlds: &mut Worlds, sequence: &Sequence, seed: u64, first: &str) -> Result<bool> {
    let Some((times, verdict)) = confirm(worlds, sequence, &format!("seed {seed}"), first)? else {
        return Ok(false);
    };
    let small = worlds.shrink(sequence, verdict.at)?;
    let (small_times, small_verdict) = worlds.confirm(&small, AGAIN)?;
    let (times, what) = match small_verdict.difference {
        Some(what) => (small_times, what),
        None => (times, verdict.difference.unwrap_or_default()),
    };
    println!("seed {seed} differs, {times} of {AGAIN} runs:\n{small}# {}\n", what.replace('\n', "\n#"));
    if let Some(directory) = &args.keep {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let text = format!("# {}\n{small}", what.replace('\n', "\n#"));
        std::fs::write(directory.join(format!("{seed}.seq")), text)?;
    }
    Ok(true)
}

/// Reads the sequences of a file or a directory, with their names.
fn read(path: &Path) -> Result<Vec<(String, Sequence)>> {
    let mut files = vec![path.to_owned()];
    if path.is_dir() {
        files = std::fs::read_dir(path)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "seq"));
        files.sort();
    }
    let parse = |file: PathBuf| {
        let name = file.display().to_string();
        let text = std::fs::read_to_string(&file).with_context(|| name.clone())?;
        Ok((name.clone(), Sequence::parse(&text).context(name)?))
    };
    files.into_iter().map(parse).collect()
}

fn odd() -> Vec<(String, Sequence)> {
    generate::every_odd_call().into_iter().map(|(name, sequence)| (name.to_owned(), sequence)).collect()
}

/// Runs named sequences. Returns `false` if one differs; a sequence that is run only once must
/// differ in a repetition too.
fn replay(args: &Args, sequences: &[(String, Sequence)]) -> Result<bool> {
    on_host(args, |worlds| {
        worlds.tells = args.trace;
        let mut same = true;
        for (name, sequence) in sequences {
            let (times, verdict) = worlds.confirm(sequence, args.times)?;
            let Some(what) = verdict.difference else { continue };
            if args.times > 1 {
                println!("{name} differs, {times} of {} runs: {what}", args.times);
                same = false;
            } else if let Some((times, _)) = confirm(worlds, sequence, name, &what)? {
                println!("{name} differs, {times} of {AGAIN} more runs: {what}");
                same = false;
            }
        }
        println!("{} sequences replayed", sequences.len());
        Ok(same)
    })
}
