//! `shunt report`: shows the gain of shunt on this machine, as one page to send to a colleague.
//!
//! Without a user's pair it runs the comparisons of `known`. With one, server and load are started
//! anew for every turn, without shunt and under it, and the first side rotates. Ratios are always
//! between figures of one round.

mod figures;
mod known;
mod look;
mod metric;
mod page;
mod pair;
mod papers;
mod ready;
mod server;
mod surroundings;
mod text;

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use regex::Regex;
use tempfile::NamedTempFile;

use crate::interrupt::interruptible;
use crate::machine::Machine;
use crate::options::parse_seconds;
use crate::progress::Progress;
use crate::side::Side;
use crate::stage::Stage;
use figures::{Report, Told, Turns};
use known::Known;
use look::Look;
use metric::Metric;
use pair::{Failure, Pair, Turn};
use surroundings::Surroundings;

/// `shunt report`
#[derive(Debug, Args)]
#[command(
    after_help = "CMD is a line for sh, run where you are. With a load that runs for a fixed time, say by --metric which of the \
    figures that it\nprints counts. A second group of REGEX is the unit, as in 'Transfer/sec: +([0-9.]+)([A-Za-z]+)'.\n\n\
    Exits with 0 if both sides worked, whatever shunt gains or loses; else with 1."
)]
pub struct Arguments {
    /// The server, started anew for every turn and ended by SIGTERM
    #[arg(long, value_name = "CMD", requires = "load")]
    program: Option<String>,

    /// What loads it; it ends by itself, and with 0
    #[arg(long, value_name = "CMD", requires = "program")]
    load: Option<String>,

    /// The server is ready when somebody listens at this port [default: when it listens at any]
    #[arg(long, value_name = "PORT", requires = "load", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,

    /// Compare with the figures of the papers that shunt comes from
    #[arg(long, conflicts_with_all = ["program", "load"])]
    papers: bool,

    /// Only figures of which this regular expression names the paper, the number or what they show
    #[arg(long, value_name = "REGEX", requires = "papers", value_parser = papers::parse_only)]
    only: Option<Regex>,

    /// How often each side has its turn [default: 5, with --papers 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1000))]
    rounds: Option<u32>,

    /// Compare the number in the brackets of this regular expression, as the load prints it last, instead of the load's time
    #[arg(long, value_name = "REGEX", requires = "load", value_parser = Metric::parse)]
    metric: Option<Metric>,

    /// The lower the number the better
    #[arg(long, requires = "metric")]
    lower_is_better: bool,

    /// End the load by SIGINT after so long, if it does not end by itself
    #[arg(long, value_name = "SECS", value_parser = parse_seconds, requires = "metric")]
    seconds: Option<f64>,

    /// How long the server may take until it listens
    #[arg(long, value_name = "SECS", default_value_t = 60.0, value_parser = parse_seconds)]
    wait: f64,

    /// How long the load may take
    #[arg(long, value_name = "SECS", default_value_t = 300.0, value_parser = parse_seconds)]
    timeout: f64,

    /// Where the page is written; what is there is replaced
    #[arg(long, value_name = "FILE", default_value = "shunt-report.html")]
    out: PathBuf,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

const SIDES: [Side; 2] = [Side::Tcp, Side::Shunt];

/// Runs the report, prints it and writes the page.
pub fn run(arguments: &Arguments) -> Result<()> {
    interruptible(|| {
        // Fail immediately instead of after minutes.
        let place = place_beside(&arguments.out)?;
        match arguments.program.as_deref().zip(arguments.load.as_deref()) {
            Some(pair) => compare(arguments, pair, place),
            None if arguments.papers => compare_with_papers(arguments, place),
            None => show(arguments, place),
        }
    })
}

fn compare(arguments: &Arguments, lines: (&str, &str), place: NamedTempFile) -> Result<()> {
    let (machine, begin) = (Machine::describe(), Instant::now());
    let others = server::adopt()?;
    let stage = Stage::amid().context("setting the stage")?;
    let [native, shunt] = measure(arguments.rounds(), &arguments.pair(lines, &stage, others))?;
    let told = Told {
        program: lines.0.to_owned(),
        load: lines.1.to_owned(),
        command: own_command(),
        lower_is_better: arguments.lower_is_better,
        seconds_in_all: begin.elapsed().as_secs_f64(),
    };
    let report = Report::new(Surroundings::describe(machine), told, &native, &shunt);
    let json = serde_json::to_string_pretty(&report)?;
    arguments.tell(place, &page::page(&report)?, &json, &text::text(&report))?;
    ensure!(report.findings.is_empty(), "{}", report.findings.join("\n"));
    Ok(())
}

fn show(arguments: &Arguments, place: NamedTempFile) -> Result<()> {
    let known = Known::measure(arguments.rounds(), own_command())?;
    arguments.tell(place, &known.page()?, &known.json()?, &known.text())
}

fn compare_with_papers(arguments: &Arguments, place: NamedTempFile) -> Result<()> {
    let papers = papers::answer(arguments.only.as_ref(), arguments.rounds(), own_command())?;
    arguments.tell(place, &papers.page(), &papers.json()?, &papers.text())?;
    papers.check()
}

/// Runs a turn of each side for inspection, and then the rounds.
fn measure(rounds: u32, pair: &Pair<'_>) -> Result<[Turns; 2]> {
    let mut sides = [Turns::default(), Turns::default()];
    eprintln!("a first turn without shunt, and one under it ...");
    let begin = Instant::now();
    let looked = match tried(pair.turn(Side::Tcp, Some(Look::new(Vec::new(), None))))? {
        Ok(turn) => turn,
        Err(failure) => bail!("this fails natively, without shunt: {failure}"),
    };
    let explain_at = Duration::from_secs_f64(looked.wall / 2.0);
    sides[0].looked = Some(looked);
    let broker = pair.stage.broker_id().into_iter().collect();
    match tried(pair.turn(Side::Shunt, Some(Look::new(broker, Some(explain_at)))))? {
        Ok(turn) => sides[1].looked = Some(turn),
        Err(Failure(failure)) => {
            sides[1].failures.push(failure);
            return Ok(sides);
        }
    }
    let progress = Progress::begin(u64::from(rounds) * 2, begin.elapsed() / 2);
    for round in 0..rounds as usize {
        for turn in 0..SIDES.len() {
            let index = (round + turn) % SIDES.len();
            progress.set_message(format!("round {}: {}", round + 1, SIDES[index].label()));
            let turn = match tried(pair.turn(SIDES[index], None))? {
                Ok(turn) => Some(turn),
                Err(Failure(failure)) => {
                    progress.say(&format!("round {}, {}: {failure}", round + 1, SIDES[index].label()));
                    sides[index].failures.push(failure);
                    None
                }
            };
            sides[index].rounds.push(turn);
            progress.inc(1);
        }
    }
    progress.end();
    Ok(sides)
}

/// Separates failures of the user's programs, which are results, from errors of this program.
fn tried(turn: Result<Turn>) -> Result<Result<Turn, Failure>> {
    match turn {
        Ok(turn) => Ok(Ok(turn)),
        Err(error) => Ok(Err(error.downcast::<Failure>()?)),
    }
}

impl Arguments {
    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.papers { 3 } else { 5 })
    }

    fn pair<'a>(
        &'a self,
        (program, load): (&'a str, &'a str),
        stage: &'a Stage,
        others: Vec<u32>,
    ) -> Pair<'a> {
        Pair {
            stage,
            program,
            load,
            port: self.port,
            metric: self.metric.as_ref(),
            seconds: self.seconds.map(Duration::from_secs_f64),
            wait: Duration::from_secs_f64(self.wait),
            limit: Duration::from_secs_f64(self.timeout),
            others,
        }
    }

    /// Writes the page, and prints the text or the JSON.
    fn tell(&self, mut place: NamedTempFile, page: &str, json: &str, text: &str) -> Result<()> {
        let writing = || format!("writing {}", self.out.display());
        place.write_all(page.as_bytes()).with_context(writing)?;
        place.persist(&self.out).with_context(writing)?;
        if self.json {
            println!("{json}");
        } else {
            print!("{text}");
        }
        eprintln!("The page: {}", self.out.display());
        Ok(())
    }
}

/// Creates a temporary file in the page's directory, which becomes the page.
fn place_beside(out: &Path) -> Result<NamedTempFile> {
    let directory = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    // The permissions of an ordinary file, because other users may read it.
    builder.prefix(".shunt-report-").permissions(Permissions::from_mode(0o666));
    builder
        .tempfile_in(directory)
        .with_context(|| format!("{} cannot be written: name another by --out", out.display()))
}

/// Returns this process's command line, quoted for a shell.
fn own_command() -> String {
    let words = std::env::args().enumerate().map(|(index, word)| match index {
        0 => "shunt".to_owned(),
        _ => quoted(&word),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_what_is_quoted_as_it_was() {
        for word in ["", "plain", "two words", "it's", "$HOME `a` \"b\" \\ *"] {
            let output = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {}", quoted(word))])
                .output();
            assert_eq!(output.unwrap().stdout, word.as_bytes());
        }
    }
}
