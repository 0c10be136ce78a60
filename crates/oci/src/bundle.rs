//! The files in which an engine hands a runtime what it shall start: config.json in a bundle, and the process of an `exec`.

use std::fs;
use std::path::Path;

use crate::overlay;
use crate::refusal::Refusal;
use crate::replace::replace;
use crate::spec::{self, Host};

const CONFIGURATION: &str = "config.json";

/// Puts the container of `bundle` under shunt. If it cannot be, it is as it was.
pub fn enter(bundle: &Path, host: &Host) -> Result<(), Refusal> {
    let bundle = std::path::absolute(bundle).unwrap_or_else(|_| bundle.to_owned());
    change(&bundle.join(CONFIGURATION), |text| spec::enter(text, &bundle, host))
}

/// Puts the process that the file `process` describes under shunt if the container of `bundle` is.
pub fn follow(process: &Path, bundle: &Path) -> Result<(), Refusal> {
    let container = read(&bundle.join(CONFIGURATION))?;
    change(process, |text| spec::follow(text, &container))
}

/// Has the program of the container of `bundle` started by `launcher`, which takes its supervisor from the descriptor `number`.
pub fn supervise(bundle: &Path, launcher: &Path, number: i32) -> Result<(), Refusal> {
    let bundle = std::path::absolute(bundle).unwrap_or_else(|_| bundle.to_owned());
    change(&bundle.join(CONFIGURATION), |text| overlay::supervise(text, &bundle, launcher, number))
}

/// The same for the process that the file `process` describes, if the container of `bundle` is so.
pub fn supervise_another(process: &Path, bundle: &Path, number: i32) -> Result<(), Refusal> {
    let container = read(&bundle.join(CONFIGURATION))?;
    change(process, |text| overlay::follow(text, &container, number))
}

/// Whether the container of `bundle` is so.
pub fn is_supervised(bundle: &Path) -> Result<bool, Refusal> {
    overlay::is_entered(&read(&bundle.join(CONFIGURATION))?)
}

fn change(path: &Path, edit: impl FnOnce(&str) -> Result<Option<String>, Refusal>) -> Result<(), Refusal> {
    let Some(changed) = edit(&read(path)?)? else { return Ok(()) };
    replace(path, &changed).map_err(|source| Refusal::File { path: path.to_owned(), source })
}

fn read(path: &Path) -> Result<String, Refusal> {
    fs::read_to_string(path).map_err(|source| Refusal::File { path: path.to_owned(), source })
}
