//! One file of the configuration. The whole file is read and checked, and every error is reported
//! with its line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;
use shunt_abi::rules;
use shunt_config::{Fault, line, suggestion};
use toml::de::{DeTable, DeValue};

use super::keys::{Key, Section};

/// A checked value, and the place in the file that it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) file: PathBuf,
    pub(crate) line: usize,
}

/// The values of one section, by key.
pub(crate) type Values = BTreeMap<&'static str, Said>;

/// The content of a file.
#[derive(Debug, Default)]
pub(crate) struct Content {
    pub(crate) run: Values,
    pub(crate) programs: BTreeMap<String, Values>,
    pub(crate) daemon: Values,
}

/// Reads and checks the file. Returns `None` if it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<Content>, Vec<Fault>> {
    let failed = |what: String| vec![Fault::of(path, what)];
    // A FIFO must not keep the program waiting for a writer.
    let mut file = match File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(failed(error.to_string())),
    };
    // The metadata is that of the open file, even if the path meanwhile names another one.
    let data = file.metadata().map_err(|error| failed(error.to_string()))?;
    if !data.is_file() {
        return Err(failed("it is no regular file".into()));
    }
    if data.mode() & 0o002 != 0 {
        return Err(failed("everybody may write it: `chmod o-w` takes that away".into()));
    }
    if data.uid() != 0 && data.uid() != geteuid().as_raw() {
        return Err(failed(format!("it belongs to user {}, neither you nor root", data.uid())));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    parse(path, &text).map(Some)
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Content, Vec<Fault>> {
    let mut reader = Reader { path, text, content: Content::default(), faults: Vec::new() };
    match DeTable::parse(text) {
        Ok(table) => reader.file(table.get_ref()),
        Err(error) => reader.fault(error.span().map(|span| span.start), error.message().to_owned()),
    }
    if reader.faults.is_empty() {
        return Ok(reader.content);
    }
    reader.faults.sort_by_key(Fault::line);
    Err(reader.faults)
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
    content: Content,
    faults: Vec<Fault>,
}

impl Reader<'_> {
    fn file(&mut self, table: &DeTable<'_>) {
        for (name, value) in table {
            let at = name.span().start;
            let Some(section) = Section::ALL.into_iter().find(|it| it.label() == name.get_ref()) else {
                let near = suggestion(name.get_ref(), Section::ALL.into_iter().map(Section::label));
                self.fault(Some(at), format!("there is no section [{}]{near}", name.get_ref()));
                continue;
            };
            let Some(table) = value.get_ref().as_table() else {
                self.fault(Some(at), format!("{} is a section: [{0}]", section.label()));
                continue;
            };
            match section {
                Section::Run => self.content.run = self.values(section, section.label(), table),
                Section::Daemon => self.content.daemon = self.values(section, section.label(), table),
                Section::Program => self.programs(table),
            }
        }
    }

    fn programs(&mut self, table: &DeTable<'_>) {
        for (name, value) in table {
            let (at, program) = (name.span().start, name.get_ref());
            let Some(table) = value.get_ref().as_table() else {
                self.fault(Some(at), format!("say of which program: [program.NAME], and below it {program}"));
                continue;
            };
            if !rules::can_be_named(program) {
                let what = format!(
                    "{program:?} is no name of a program: the last part of its path, without colon and semicolon"
                );
                self.fault(Some(at), what);
                continue;
            }
            let values = self.values(Section::Program, &format!("program.{program}"), table);
            self.content.programs.insert(program.to_string(), values);
        }
    }

    fn values(&mut self, section: Section, title: &str, table: &DeTable<'_>) -> Values {
        let mut values = Values::new();
        for (name, value) in table {
            let Some(key) = section.keys().iter().find(|key| key.name == name.get_ref()) else {
                let what = unknown(section, title, name.get_ref());
                self.fault(Some(name.span().start), what);
                continue;
            };
            match checked(key, value.get_ref()) {
                Ok(text) => {
                    let line = line(self.text, value.span().start);
                    values.insert(key.name, Said { text, file: self.path.to_owned(), line });
                }
                Err(why) => self.fault(Some(value.span().start), format!("{}: {why}", key.name)),
            }
        }
        values
    }

    fn fault(&mut self, at: Option<usize>, what: String) {
        self.faults.push(match at {
            Some(at) => Fault::at(self.path, self.text, at, what),
            None => Fault::of(self.path, what),
        });
    }
}

fn checked(key: &Key, value: &DeValue<'_>) -> Result<String, String> {
    let text = match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
        _ => return Err("expected a text or a decimal number".to_owned()),
    };
    (key.check)(&text).map_err(|why| format!("{text:?}: {why}"))?;
    Ok(text)
}

fn unknown(section: Section, title: &str, name: &str) -> String {
    let elsewhere = Section::ALL
        .into_iter()
        .find(|other| *other != section && other.keys().iter().any(|key| key.name == name))
        .map(|other| format!("; it belongs to [{}]", other.label()));
    let near = || suggestion(name, section.keys().iter().map(|key| key.name));
    format!("there is no key {name} in [{title}]{}", elsewhere.unwrap_or_else(near))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<String> {
        let faults = parse(Path::new("f"), text).expect_err(text);
        faults.iter().map(Fault::to_string).collect()
    }

    #[test]
    fn values_have_their_lines() {
        let text =
            "[run]\nspin = 50\n\n[program.\"a b\"]\noffer = \"at-once\"\n[daemon]\nring-bytes = 65536\n";
        let content = parse(Path::new("f"), text).unwrap();
        let said = |text: &str, line| Said { text: text.into(), file: "f".into(), line };
        assert_eq!(content.run["spin"], said("50", 2));
        assert_eq!(content.programs["a b"]["offer"], said("at-once", 5));
        assert_eq!(content.daemon["ring-bytes"], said("65536", 7));
    }

    #[test]
    fn everything_that_is_wrong_is_said_with_its_line() {
        let text = "[run]\nspni = 50\nspin = \"on\"\n[programs.a]\n[program.a]\nidle-exit = 3\n[program]\nspin = 1\n";
        assert_eq!(
            faults(text),
            [
                "f:2: there is no key spni in [run]; did you mean spin?",
                "f:3: spin: \"on\": expected auto, off, or microseconds from 0 to 1000000",
                "f:4: there is no section [programs]; did you mean program?",
                "f:6: there is no key idle-exit in [program.a]; it belongs to [daemon]",
                "f:8: say of which program: [program.NAME], and below it spin",
            ]
        );
    }

    #[test]
    fn what_is_no_configuration_is_refused() {
        for (text, complaint) in [
            ("spin = 1", "there is no section [spin]; there are run, program, daemon"),
            ("run = 1", "run is a section"),
            ("[run]\nspin = true", "f:2: spin: expected a text or a decimal number"),
            ("[run]\nspin = -1", "expected auto, off"),
            ("[run]\nspin = 0x10", "a decimal number"),
            ("[run]\nspin 1", "f:2:"),
            ("[program.\"/bin/a\"]", "no name of a program"),
            ("[run]\nspin = 1\nspin = 2", "f:3:"),
        ] {
            let said = faults(text);
            assert!(said[0].contains(complaint), "{said:?}");
        }
    }

    #[test]
    fn a_file_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shunt.toml");
        assert!(read(&path).unwrap().is_none());
        std::fs::write(&path, "").unwrap();
        assert!(read(&path).unwrap().is_some());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert!(read(&path).unwrap_err()[0].to_string().contains("everybody may write it"));
    }

    #[test]
    fn what_is_no_file_is_refused_and_does_not_block() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shunt.toml");
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        for path in [&path, directory.path()] {
            assert!(read(path).unwrap_err()[0].to_string().contains("no regular file"));
        }
    }
}
