//! `shunt config show` and `shunt config check`, for people and as JSON.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use shunt_config::Fault;

use super::file::{Said, Values};
use super::keys::{Key, Section};
use super::{OfBroker, OfPrograms, broker_files, files, read_one};
use crate::table::{Column, left, render};

/// The values in effect.
#[derive(Debug, Serialize)]
struct Report {
    files: Vec<File>,
    settings: Vec<Setting>,
}

#[derive(Debug, Serialize)]
struct File {
    path: PathBuf,
    /// Whether the file exists. A missing file sets nothing.
    is_there: bool,
}

/// One value, and where it comes from.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Setting {
    section: String,
    key: &'static str,
    value: String,
    #[serde(flatten)]
    origin: Origin,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "from")]
enum Origin {
    Default,
    Environment { variable: &'static str },
    File { file: PathBuf, line: usize },
}

impl Origin {
    fn label(&self) -> String {
        match self {
            Origin::Default => "default".to_owned(),
            Origin::Environment { variable } => (*variable).to_owned(),
            Origin::File { file, line } => format!("{}:{line}", file.display()),
        }
    }
}

pub(super) fn show(program: Option<&str>, json: bool) -> Result<()> {
    let programs = OfPrograms::read()?;
    let settings = match program {
        Some(program) => of_program(&programs, program),
        None => of_all(&programs)?,
    };
    let files = files().into_iter().map(|path| File { is_there: path.is_file(), path }).collect();
    let report = Report { files, settings };
    match json {
        true => println!("{}", serde_json::to_string_pretty(&report).context("it cannot be printed")?),
        false => print!("{}", text(&report)),
    }
    Ok(())
}

fn of_program(programs: &OfPrograms, program: &str) -> Vec<Setting> {
    let section = format!("program.{program}");
    let keys = Section::Program.keys().iter();
    keys.map(|key| setting(&section, key, programs.said(program, key.name), true)).collect()
}

fn of_all(programs: &OfPrograms) -> Result<Vec<Setting>> {
    let section = |name: &str, section: Section, values: &Values, has_environment| {
        let keys = section.keys().iter();
        let settings = keys.map(|key| setting(name, key, values.get(key.name), has_environment));
        settings.collect::<Vec<Setting>>()
    };
    let mut all = section(Section::Run.label(), Section::Run, &programs.run, true);
    for (program, values) in &programs.programs {
        let settings = of_program(programs, program);
        all.extend(settings.into_iter().filter(|setting| values.contains_key(setting.key)));
    }
    all.extend(section(Section::Daemon.label(), Section::Daemon, &OfBroker::read(false)?.0, true));
    // The system's broker is started with another environment, so the variables of this one do not
    // apply.
    all.extend(section("daemon --system", Section::Daemon, &OfBroker::read(true)?.0, false));
    Ok(all)
}

fn setting(section: &str, key: &Key, said: Option<&Said>, has_environment: bool) -> Setting {
    let variable = key.variable.filter(|_| has_environment);
    let told = variable.and_then(|variable| Some((variable, std::env::var(variable).ok()?)));
    let (value, origin) = match (told.filter(|(_, text)| !text.is_empty()), said) {
        (Some((variable, text)), _) => (text, Origin::Environment { variable }),
        (None, Some(said)) => (said.text.clone(), Origin::File { file: said.file.clone(), line: said.line }),
        (None, None) => (key.default.to_owned(), Origin::Default),
    };
    Setting { section: section.to_owned(), key: key.name, value, origin }
}

fn text(report: &Report) -> String {
    let state = |file: &File| if file.is_there { "read" } else { "not there" };
    let files: Vec<Vec<String>> = report
        .files
        .iter()
        .map(|file| vec![file.path.display().to_string(), state(file).to_owned()])
        .collect();
    let settings: Vec<Vec<String>> = report
        .settings
        .iter()
        .map(|it| vec![it.section.clone(), it.key.to_owned(), it.value.clone(), it.origin.label()])
        .collect();
    match files.is_empty() {
        true => render(&SETTINGS, &settings),
        false => format!("{}\n{}", render(&FILES, &files), render(&SETTINGS, &settings)),
    }
}

const FILES: [Column; 2] = [left("FILE", 0), left("STATE", 0)];
const SETTINGS: [Column; 4] = [left("SECTION", 0), left("KEY", 0), left("VALUE", 0), left("FROM", 0)];

/// Prints every error in `file`, or in the files that are in effect.
pub(super) fn check(file: Option<&Path>, json: bool) -> Result<()> {
    let faults = match file {
        Some(path) => match super::file::read(path) {
            Ok(Some(_)) => Vec::new(),
            Ok(None) => vec![Fault::of(path, "there is no such file")],
            Err(faults) => faults,
        },
        None => {
            let mut all: Vec<PathBuf> = [files(), broker_files(true)].concat();
            all.sort();
            all.dedup();
            all.iter().filter_map(|path| read_one(path).err()).flatten().collect()
        }
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&faults).context("it cannot be printed")?);
    } else {
        for fault in &faults {
            writeln!(std::io::stderr(), "{fault}")?;
        }
    }
    match faults.len() {
        0 => Ok(()),
        1 => bail!("1 thing is wrong"),
        more => bail!("{more} things are wrong"),
    }
}
