//! `shunt doctor --live`: starts a server and a client for each kind of pair, has them exchange
//! data, and reports which transport their connection used.
//!
//! Nothing is left behind: the two programs are files in memory, network namespaces have no names,
//! and a program ends when its peer or its standard input does. Each kind has a deadline.

mod containers;
mod ends;
mod namespaces;
mod pair;

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::explain::Cause;
use crate::screen::{Screen, Tone};
use crate::table::{self, Column, left, right};
use crate::{broker, daemon};
use ends::{Limit, Programs};

/// How long a kind may take. Containers have a longer limit.
const LIMIT: Duration = Duration::from_secs(15);

/// A kind of pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Two programs in this network namespace
    SameNamespace,
    /// Two programs in two network namespaces, which doctor makes and removes
    TwoNamespaces,
    /// Two containers of Docker or Podman, with shunt's runtime
    Containers,
    /// Two static programs
    Static,
}

impl Kind {
    fn label(self) -> &'static str {
        match self {
            Kind::SameNamespace => "same namespace",
            Kind::TwoNamespaces => "two namespaces",
            Kind::Containers => "containers",
            Kind::Static => "static programs",
        }
    }
}

/// What became of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    /// Both directions used shared memory.
    SharedMemory,
    /// One direction used shared memory.
    Mixed,
    Tcp,
    /// The two programs could not exchange their data.
    Failed,
    /// This kind cannot be tried here.
    NotTried,
}

impl Outcome {
    fn label(self) -> &'static str {
        match self {
            Outcome::SharedMemory => "shared memory",
            Outcome::Mixed => "mixed",
            Outcome::Tcp => "TCP",
            Outcome::Failed => "failed",
            Outcome::NotTried => "not tried",
        }
    }

    fn tone(self) -> Tone {
        match self {
            Outcome::SharedMemory => Tone::Good,
            Outcome::NotTried => Tone::Plain,
            Outcome::Mixed | Outcome::Tcp => Tone::Warning,
            Outcome::Failed => Tone::Bad,
        }
    }

    fn of_label(label: &str) -> Option<Outcome> {
        let all = [Outcome::SharedMemory, Outcome::Mixed, Outcome::Tcp, Outcome::Failed, Outcome::NotTried];
        all.into_iter().find(|outcome| outcome.label() == label)
    }
}

/// The result for one kind.
#[derive(Debug, Serialize)]
struct Tried {
    kind: Kind,
    outcome: Outcome,
    /// The bytes that were exchanged and compared, of both directions.
    verified_bytes: u64,
    /// Those that went through shared memory, as both programs have counted them.
    shm_bytes: u64,
    /// Why the outcome is not shared memory.
    causes: Vec<Cause>,
}

impl Tried {
    /// Returns the result for a kind without an exchange.
    fn without(kind: Kind, outcome: Outcome, cause: Cause) -> Tried {
        Tried { kind, outcome, verified_bytes: 0, shm_bytes: 0, causes: vec![cause] }
    }

    fn not_tried(kind: Kind, cause: Cause) -> Tried {
        Tried::without(kind, Outcome::NotTried, cause)
    }

    /// Returns whether the pair was tried and did not use shared memory.
    fn is_fault(&self) -> bool {
        !matches!(self.outcome, Outcome::SharedMemory | Outcome::NotTried)
    }
}

#[derive(Debug, Serialize)]
struct Report {
    /// Whether every pair that was tried used shared memory. `false` if none was tried.
    served: bool,
    /// The broker of all kinds but containers, which use the system's.
    broker: Option<PathBuf>,
    pairs: Vec<Tried>,
}

/// Tries the kinds, prints the report, and returns whether all that were tried use shared memory.
pub(super) fn run(args: &DoctorArgs) -> Result<bool> {
    let interrupted = daemon::stop_flag().context("signals cannot be waited for")?;
    let programs = Programs::make()?;
    let site = Site::find(args.broker.as_deref());
    let kinds: Vec<Kind> = Kind::value_variants()
        .iter()
        .copied()
        .filter(|kind| args.kind.is_empty() || args.kind.contains(kind))
        .collect();
    let mut pairs = Vec::new();
    for kind in kinds {
        let limit = Limit::new(LIMIT, &interrupted);
        let tried = match kind {
            Kind::SameNamespace => pair::on_loopback(kind, programs.dynamic(), &site, &limit),
            Kind::Static => match programs.alone() {
                Some(program) => pair::on_loopback(kind, program, &site, &limit),
                None => Ok(Tried::not_tried(kind, no_static())),
            },
            Kind::TwoNamespaces => namespaces::try_it(programs.dynamic(), &site, &limit),
            Kind::Containers => containers::try_it(programs.dynamic(), &interrupted),
        };
        if limit.is_interrupted() {
            bail!("interrupted; what was started has ended");
        }
        let failed = |error: anyhow::Error| Tried::without(kind, Outcome::Failed, failure(&error));
        pairs.push(tried.unwrap_or_else(failed));
    }
    let served =
        pairs.iter().any(|pair| pair.outcome == Outcome::SharedMemory) && !pairs.iter().any(Tried::is_fault);
    let report = Report { served, broker: site.broker, pairs };
    let text = match args.json {
        true => serde_json::to_string_pretty(&report).context("the report cannot be printed")? + "\n",
        false => render(&report, &Screen::of_output()),
    };
    std::io::stdout().write_all(text.as_bytes()).context("the report cannot be printed")?;
    Ok(served)
}

/// The broker that the programs use.
struct Site {
    /// The socket of a broker that answers.
    broker: Option<PathBuf>,
    /// The socket that the programs are started with.
    socket: PathBuf,
    /// Why there is no broker.
    why_none: Option<String>,
}

/// A path at which no broker is and none is started.
const NOWHERE: &str = "/nonexistent/broker.sock";

impl Site {
    /// Doctor starts no broker: it reports how programs fare with the one that there is.
    fn find(asked: Option<&Path>) -> Site {
        let none = |why: String, socket: &Path| Site {
            broker: None,
            socket: socket.to_owned(),
            why_none: Some(why),
        };
        let Some(path) = asked.map(Path::to_owned).or_else(broker::first_alive) else {
            return none("no broker runs, neither your own nor the system's".into(), Path::new(NOWHERE));
        };
        // The programs have other working directories.
        let path = std::path::absolute(&path).unwrap_or(path);
        match broker::probe(&path) {
            Ok(_) => Site { broker: Some(path.clone()), socket: path, why_none: None },
            // `shunt run` would start a broker at this path if it is the user's own.
            Err(broker::Unusable::Absent) => {
                none(format!("{}: {}", path.display(), broker::Unusable::Absent), Path::new(NOWHERE))
            }
            Err(error) => none(format!("{}: {error}", path.display()), &path),
        }
    }
}

fn cause(label: &'static str, explanation: impl Into<String>, advice: impl Into<String>) -> Cause {
    Cause { label: label.into(), explanation: explanation.into(), advice: advice.into() }
}

fn needs_root(explanation: &str) -> Cause {
    cause("needs_root", explanation, "Run it as root: `sudo shunt doctor --live`.")
}

fn no_static() -> Cause {
    cause(
        "other_processor",
        "Static programs can be under shunt on x86-64 only.",
        "No action needed: other kinds are not affected.",
    )
}

fn failure(error: &anyhow::Error) -> Cause {
    let mut explanation = format!("{error:#}");
    if let Some(first) = explanation.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    cause(
        "failed",
        explanation + ".",
        "Run `shunt doctor`; if it finds nothing, report this with `shunt bugreport`.",
    )
}

const COLUMNS: [Column; 5] =
    [left("KIND", 0), left("TRANSPORT", 1), right("VERIFIED", 3), right("BY SHM", 4), left("REASON", 2)];

fn render(report: &Report, screen: &Screen) -> String {
    let row = |tried: &Tried| {
        let moved = |bytes: u64| if tried.verified_bytes == 0 { String::new() } else { table::bytes(bytes) };
        let labels: Vec<&str> = tried.causes.iter().map(|cause| &*cause.label).collect();
        vec![
            tried.kind.label().to_owned(),
            tried.outcome.label().to_owned(),
            moved(tried.verified_bytes),
            moved(tried.shm_bytes),
            labels.join(", "),
        ]
    };
    let rows: Vec<Vec<String>> = report.pairs.iter().map(row).collect();
    let tone = |column: &Column, cell: &str| match column.title {
        "TRANSPORT" => Outcome::of_label(cell).map_or(Tone::Plain, Outcome::tone),
        _ => Tone::Plain,
    };
    let mut text = match &report.broker {
        Some(path) => format!("broker at {}\n\n", path.display()),
        None => String::new(),
    };
    text += &screen.table(&COLUMNS, &rows, tone);
    let mut explained: Vec<&Cause> = Vec::new();
    for cause in report.pairs.iter().flat_map(|tried| &tried.causes) {
        if explained.contains(&cause) {
            continue;
        }
        if explained.is_empty() {
            text.push('\n');
        }
        explained.push(cause);
        let label = screen.paint(&cause.label, Tone::Title);
        let _ = writeln!(
            text,
            "{label}{}",
            screen.wrap(&format!(": {}", cause.explanation), cause.label.len(), 2)
        );
        let _ = writeln!(text, "  {}", screen.wrap(&format!("What to do: {}", cause.advice), 2, 2));
    }
    let tried = report.pairs.iter().filter(|pair| pair.outcome != Outcome::NotTried).count();
    let served = report.pairs.iter().filter(|pair| pair.outcome == Outcome::SharedMemory).count();
    let verdict = match (tried, served) {
        (0, _) => "No pair could be tried.".to_owned(),
        (tried, served) if tried == served && tried == report.pairs.len() => {
            "Every pair used shared memory.".to_owned()
        }
        (tried, served) if tried == served => {
            format!("Every pair that was tried used shared memory: {served} of {}.", report.pairs.len())
        }
        (tried, served) => format!("{served} of the {tried} pairs that were tried used shared memory."),
    };
    text + "\n" + &screen.wrap(&verdict, 0, 0) + "\n"
}
