//! The files that a container engine passes to an OCI runtime: config.json in a bundle, and the
//! process description of an `exec`.

use std::fs;
use std::path::Path;

use crate::annotations;
use crate::overlay::{self, Supervision};
use crate::refusal::Refusal;
use crate::replace::replace;
use crate::spec::{self, Host};

const CONFIGURATION: &str = "config.json";

/// Adds shunt to the configuration of the container in `bundle`. If that fails, the configuration
/// is unchanged.
pub fn enter(bundle: &Path, host: &Host) -> Result<(), Refusal> {
    let bundle = std::path::absolute(bundle).unwrap_or_else(|_| bundle.to_owned());
    change(&bundle.join(CONFIGURATION), |text| spec::enter(text, &bundle, host))
}

/// Adds shunt to the process that the file `process` describes, if the container of `bundle` has
/// it.
pub fn follow(process: &Path, bundle: &Path) -> Result<(), Refusal> {
    let container = read(&bundle.join(CONFIGURATION))?;
    change(process, |text| spec::follow(text, &container))
}

/// Returns how the programs of the container in `bundle` are to be supervised, and stores that next
/// to the configuration. `is_trusted` is set on a host whose router trusts containers.
pub fn supervise(bundle: &Path, is_trusted: bool) -> Result<Supervision, Refusal> {
    let marking = |source| Refusal::File { path: bundle.to_owned(), source };
    overlay::forget(bundle).map_err(marking)?;
    let supervision = overlay::considered(&read(&bundle.join(CONFIGURATION))?, is_trusted)?;
    overlay::remember(bundle, supervision).map_err(marking)?;
    Ok(supervision)
}

/// Stores in `directory` what the annotations of the container in `bundle` say about it, for the
/// router of the overlay.
pub fn describe(bundle: &Path, directory: &Path) -> Result<(), Refusal> {
    let bundle = std::path::absolute(bundle).unwrap_or_else(|_| bundle.to_owned());
    let id = bundle.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some(described) = annotations::described(&read(&bundle.join(CONFIGURATION))?, &id)? else {
        return Ok(());
    };
    described.store(directory).map_err(|source| Refusal::File { path: directory.to_owned(), source })
}

/// Returns how the programs of a running container are supervised. `None` if they are not.
pub fn supervision(bundle: &Path) -> Result<Option<Supervision>, Refusal> {
    overlay::remembered(bundle).map_err(|source| Refusal::File { path: bundle.to_owned(), source })
}

/// Removes what [`supervise`] has stored: the container is started without a supervisor.
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
