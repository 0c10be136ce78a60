//! The files in which an engine hands a runtime what it shall start: config.json in a bundle, and the process of an `exec`.

use std::fs;
use std::path::Path;

use crate::overlay::{self, Supervision};
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

/// How the programs of the container of `bundle` are to be supervised, on a host whose router trusts containers or does not. It is
/// remembered.
pub fn supervise(bundle: &Path, is_trusted: bool) -> Result<Supervision, Refusal> {
    let marking = |source| Refusal::File { path: bundle.to_owned(), source };
    overlay::forget(bundle).map_err(marking)?;
    let supervision = overlay::considered(&read(&bundle.join(CONFIGURATION))?, is_trusted)?;
    overlay::remember(bundle, supervision).map_err(marking)?;
    Ok(supervision)
}

/// How those of a container that runs are. None: they are not.
pub fn supervision(bundle: &Path) -> Result<Option<Supervision>, Refusal> {
    overlay::remembered(bundle).map_err(|source| Refusal::File { path: bundle.to_owned(), source })
}

/// The container of `bundle` is started without, after all.
pub fn let_go(bundle: &Path) -> Result<(), Refusal> {
    overlay::forget(bundle).map_err(|source| Refusal::File { path: bundle.to_owned(), source })
}

fn change(path: &Path, edit: impl FnOnce(&str) -> Result<Option<String>, Refusal>) -> Result<(), Refusal> {
    let Some(changed) = edit(&read(path)?)? else { return Ok(()) };
    replace(path, &changed).map_err(|source| Refusal::File { path: path.to_owned(), source })
}

fn read(path: &Path) -> Result<String, Refusal> {
    fs::read_to_string(path).map_err(|source| Refusal::File { path: path.to_owned(), source })
}
