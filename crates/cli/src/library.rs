//! Finds libshunt.so, and adds it to LD_PRELOAD.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// The environment variable that overrides the location of libshunt.so.
const VARIABLE: &str = "SHUNT_LIB";
const NAME: &str = "libshunt.so";

/// Returns the absolute path of libshunt.so: `$SHUNT_LIB`, or next to this program, or where `make
/// install` puts it.
pub(crate) fn find() -> Result<PathBuf> {
    let found = match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        Some(path) if Path::new(&path).is_file() => PathBuf::from(path),
        Some(path) => bail!("SHUNT_LIB names {}, which is no file", Path::new(&path).display()),
        None => {
            let program = std::env::current_exe()?;
            let directory = program.parent().unwrap_or(Path::new("/"));
            let places = [directory.join(NAME), directory.join("../lib/shunt").join(NAME)];
            let Some(place) = places.iter().find(|place| place.is_file()) else {
                bail!("no {NAME} in {} or {}", places[0].display(), places[1].display());
            };
            place.clone()
        }
    };
    let path = std::path::absolute(&found).and_then(|path| path.canonicalize())?;
    if path.as_os_str().as_bytes().iter().any(|byte| SEPARATORS.contains(byte)) {
        bail!("LD_PRELOAD cannot hold a path with a space or a colon: {}", path.display());
    }
    Ok(path)
}

/// The characters that separate libraries in LD_PRELOAD.
const SEPARATORS: &[u8] = b" :";

/// Returns LD_PRELOAD with `library` first. All other entries are kept.
pub(crate) fn preload(existing: Option<&OsStr>, library: &Path) -> OsString {
    let rest = without(existing, library).unwrap_or_default();
    let mut all = library.as_os_str().to_owned();
    if !rest.is_empty() {
        all.push(":");
        all.push(rest);
    }
    all
}

/// Returns LD_PRELOAD without `library`. `None` if it has no other entry.
pub(crate) fn without(existing: Option<&OsStr>, library: &Path) -> Option<OsString> {
    let others: Vec<&[u8]> = existing?
        .as_bytes()
        .split(|byte| SEPARATORS.contains(byte))
        .filter(|entry| !entry.is_empty() && *entry != library.as_os_str().as_bytes())
        .collect();
    (!others.is_empty()).then(|| OsString::from_vec(others.join(&b':')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_preloaded_already_stays() {
        let library = Path::new("/lib/libshunt.so");
        for (before, after) in [
            (None, "/lib/libshunt.so"),
            (Some(""), "/lib/libshunt.so"),
            (Some("/a.so"), "/lib/libshunt.so:/a.so"),
            (Some("/a.so /b.so"), "/lib/libshunt.so:/a.so:/b.so"),
            (Some("/lib/libshunt.so"), "/lib/libshunt.so"),
            (Some("/a.so:/lib/libshunt.so"), "/lib/libshunt.so:/a.so"),
        ] {
            assert_eq!(preload(before.map(OsStr::new), library), after, "{before:?}");
        }
        assert_eq!(without(Some("/lib/libshunt.so:/a.so".as_ref()), library), Some("/a.so".into()));
        assert_eq!(without(Some("/lib/libshunt.so".as_ref()), library), None);
        assert_eq!(without(None, library), None);
    }
}
