//! Finds what a service keeps from one message to the next outside of its state. The two halves would
//! each keep their own, so their answers would differ.

use std::fmt;
use std::path::Path;

use object::{Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind};
use thiserror::Error;

use super::build::HEADERS;
use crate::service::file::SECTION;

/// The error about variables and BPF maps that the halves would not share.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "the kernel and user space would each have their own {}: a service keeps its state in `struct shunt_state` and in \
     `shunt_session`, which both share (docs/serve.md, State)",
    .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
)]
pub struct Unshared(Vec<Variable>);

/// A variable or a BPF map in which a service keeps something.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variable {
    /// Its name in the source.
    name: String,
    /// FILE:LINE where the source first names it, if the source is there.
    place: Option<String>,
}

impl fmt::Display for Variable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(formatter, "`{}` at {place}", self.name),
            None => write!(formatter, "`{}`", self.name),
        }
    }
}

/// Returns an error if a service has variables in its native half that are not constant, or something
/// else in its BPF half than the maps of the headers. `source` is searched for their lines.
pub fn check_state(object: &[u8], source: Option<&Path>) -> Result<(), Unshared> {
    let found = variables_of(object, source);
    if found.is_empty() { Ok(()) } else { Err(Unshared(found)) }
}

fn variables_of(object: &[u8], source: Option<&Path>) -> Vec<Variable> {
    let Ok(kernel) = object::File::parse(object) else { return Vec::new() };
    let native = kernel.section_by_name(SECTION).and_then(|section| section.data().ok());
    let native = native.and_then(|bytes| object::File::parse(bytes).ok());
    let mut names = native.as_ref().map_or_else(Vec::new, variables);
    names.extend(variables(&kernel).into_iter().filter(|name| !is_in_headers(name)));
    names.sort();
    names.dedup();
    let text = source.and_then(|path| Some((path, std::fs::read_to_string(path).ok()?)));
    let place = |name: &str| {
        let (path, text) = text.as_ref()?;
        let line = text.lines().position(|line| has_word(line, name))?;
        Some(format!("{}:{}", path.display(), line + 1))
    };
    names.into_iter().map(|name| Variable { place: place(&name), name }).collect()
}

/// Returns the names of all objects that can be written.
fn variables(file: &object::File<'_>) -> Vec<String> {
    let is_writable = |symbol: &object::Symbol<'_, '_>| {
        let section = symbol.section_index().and_then(|index| file.section_by_index(index).ok());
        section.is_some_and(|section| {
            let kinds = [SectionKind::Data, SectionKind::UninitializedData, SectionKind::Common];
            kinds.contains(&section.kind()) && section.name() != Ok(".data.rel.ro")
                || matches!(section.name(), Ok(".maps" | ".bss" | ".data"))
        })
    };
    // The linker's own symbols have no size.
    let is_variable =
        |symbol: &object::Symbol<'_, '_>| symbol.kind() == SymbolKind::Data && symbol.size() > 0;
    let symbols = file.symbols().filter(|symbol| is_variable(symbol) && is_writable(symbol));
    // The compiler calls a variable of a function FUNCTION.VARIABLE.
    let name = |symbol: object::Symbol<'_, '_>| Some(symbol.name().ok()?.rsplit('.').next()?.to_owned());
    symbols.filter_map(name).collect()
}

/// Returns whether the engine's own headers declare something of this name in a section.
fn is_in_headers(name: &str) -> bool {
    HEADERS
        .iter()
        .flat_map(|(_, text)| text.lines())
        .any(|line| line.contains("SEC(") && has_word(line, name))
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_')).any(|one| one == word)
}
