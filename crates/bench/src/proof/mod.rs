//! `shunt report`: shows the gain of shunt on this machine, as one page to send to a colleague.
//!
//! Without a user's pair it runs the comparisons of `known`. With one, server and load are started
//! anew for every turn, without shunt and under it, and the first side rotates. Ratios are always
//! between figures of one round.

mod figures;
mod known;
mod latency;
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
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use shunt_bench_args::report::Arguments;
use shunt_bench_args::side::Side;
use tempfile::NamedTempFile;

use crate::comparison::rotated;
use crate::interrupt::interruptible;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::stage::Stage;
use figures::{Report, Told, Turns};
use known::Known;
use look::Look;
use metric::Metric;
use pair::{Failure, Pair, Turn};
use surroundings::Surroundings;

/// Checks the expression of `--metric`.
pub(crate) fn check_metric(text: &str) -> Result<String, String> {
    Metric::parse(text).map(|_| text.to_owned())
}

/// Checks the expression of `--only`.
pub(crate) fn check_only(text: &str) -> Result<String, regex::Error> {
    papers::parse_only(text).map(|_| text.to_owned())
}

/// The sides of a round. The second native turn is the control: it shows how much figures differ
/// without any cause.
const SIDES: [Side; 3] = [Side::Tcp, Side::TcpAgain, Side::Shunt];

/// Runs the report, prints it and writes the page.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
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
    let metric = arguments.metric.as_deref().map(Metric::parse).transpose().map_err(Error::msg)?;
    let pair = pair(arguments, lines, &stage, metric.as_ref(), others);
    let [native, again, shunt] = measure(arguments.rounds(), &pair)?;
    let told = Told {
        program: lines.0.to_owned(),
        load: lines.1.to_owned(),
        command: own_command(),
        lower_is_better: arguments.lower_is_better,
        seconds_in_all: begin.elapsed().as_secs_f64(),
    };
    let report = Report::new(Surroundings::describe(machine), told, &native, &again, &shunt);
    let json = serde_json::to_string_pretty(&report)?;
    tell(arguments, place, &page::page(&report)?, &json, &text::text(&report))?;
    ensure!(report.findings.is_empty(), "{}", report.findings.join("\n"));
    Ok(())
}

fn show(arguments: &Arguments, place: NamedTempFile) -> Result<()> {
    let known = Known::measure(arguments.rounds(), own_command())?;
    tell(arguments, place, &known.page()?, &known.json()?, &known.text())
}

fn compare_with_papers(arguments: &Arguments, place: NamedTempFile) -> Result<()> {
    let only = arguments.only.as_deref().map(papers::parse_only).transpose()?;
    let papers = papers::answer(only.as_ref(), arguments.rounds(), own_command())?;
    tell(arguments, place, &papers.page(), &papers.json()?, &papers.text())?;
    papers.check()
}

/// Runs a turn of each side for inspection, and then the rounds.
fn measure(rounds: u32, pair: &Pair<'_>) -> Result<[Turns; 3]> {
    let mut sides = [Turns::default(), Turns::default(), Turns::default()];
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
        Ok(turn) => sides[2].looked = Some(turn),
        Err(Failure(failure)) => {
            sides[2].failures.push(failure);
            return Ok(sides);
        }
    }
    let progress = Progress::begin(u64::from(rounds) * SIDES.len() as u64, begin.elapsed() / 2);
    for (round, index) in rotated(rounds, SIDES.len()) {
        progress.set_message(format!("round {}: {}", round + 1, SIDES[index].label()));
        let turn = match tried(pair.turn(native_as_tcp(SIDES[index]), None))? {
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
    progress.end();
    Ok(sides)
}

/// Returns the side that a turn is run on: the control is a plain native turn.
fn native_as_tcp(side: Side) -> Side {
    if side == Side::TcpAgain { Side::Tcp } else { side }
}

/// Separates failures of the user's programs, which are results, from errors of this program.
fn tried(turn: Result<Turn>) -> Result<Result<Turn, Failure>> {
    match turn {
        Ok(turn) => Ok(Ok(turn)),
        Err(error) => Ok(Err(error.downcast::<Failure>()?)),
    }
}

fn pair<'a>(
    arguments: &'a Arguments,
    (program, load): (&'a str, &'a str),
    stage: &'a Stage,
    metric: Option<&'a Metric>,
    others: Vec<u32>,
) -> Pair<'a> {
    Pair {
        stage,
        program,
        load,
        port: arguments.port,
        metric,
        seconds: arguments.seconds.map(Duration::from_secs_f64),
        wait: Duration::from_secs_f64(arguments.wait),
        limit: Duration::from_secs_f64(arguments.timeout),
        others,
    }
}

/// Writes the page, and prints the text or the JSON.
fn tell(arguments: &Arguments, mut place: NamedTempFile, page: &str, json: &str, text: &str) -> Result<()> {
    let out = &arguments.out;
    let writing = || format!("writing {}", out.display());
    place.write_all(page.as_bytes()).with_context(writing)?;
    place.persist(out).with_context(writing)?;
    if arguments.json {
        println!("{json}");
    } else {
        print!("{text}");
    }
    eprintln!("The page: {}", out.display());
    Ok(())
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

/// Returns the command line as a user writes it, quoted for a shell.
fn own_command() -> String {
    let words = std::env::args().skip_while(|word| word != "report").map(|word| quoted(&word));
    std::iter::once("shunt".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
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
