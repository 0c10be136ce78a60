//! Fills content stores of a service with files, before the first client and at each reload.
//!
//! A file is the content of its name. A directory has a content for each file in it, whose key is the
//! path from there, as in `css/site.css`. What a reload does not find any more is deleted. Contents
//! that the service has stored stay, unless a file has the same key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::shared::Shared;
use crate::service::contents::Table;
use crate::service::layout::Part;

/// Files for a content store: `NAME=PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The store, a member of the service's state.
    pub store: String,
    /// A file, or a directory.
    pub path: PathBuf,
}

impl FromStr for Files {
    type Err = String;

    fn from_str(text: &str) -> Result<Files, String> {
        match text.split_once('=') {
            Some((store, path)) if !store.is_empty() && !path.is_empty() => {
                Ok(Files { store: store.to_owned(), path: path.into() })
            }
            _ => Err("a content store and its files are NAME=PATH".to_owned()),
        }
    }
}

/// The keys that files have given to each store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filled(BTreeMap<String, Vec<Vec<u8>>>);

/// The contents of files, by their keys.
type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

/// The most levels of directories.
const LEVELS: usize = 16;

/// Puts the files into the stores, and deletes what `before` has and the files do not. Changes nothing
/// if a file cannot be read or does not fit.
pub(crate) fn fill(shared: &Shared, files: &[Files], before: &Filled) -> Result<Filled, String> {
    let mut read: BTreeMap<&str, (Table, Contents)> = BTreeMap::new();
    for Files { store, path } in files {
        let (part, (table, key, room)) = part(shared, store)?;
        let (_, found) = read.entry(store).or_insert((table, Contents::new()));
        collect(path, found, key, room)?;
        let capacity = part.fill(&shared.store).map_or(0, |fill| fill.capacity);
        if found.len() as u64 > capacity {
            return Err(format!("{}: more files than the {capacity} of {store}", path.display()));
        }
    }
    let mut filled = Filled::default();
    for (store, (table, contents)) in read {
        let former = before.0.get(store).map_or(&[][..], Vec::as_slice);
        for key in former.iter().filter(|key| !contents.contains_key(*key)) {
            shared.service.put(&table, key, None);
        }
        let keys = contents.into_iter().map(|(key, bytes)| {
            if !shared.service.put(&table, &key, Some(&bytes)) {
                tracing::warn!(store, key = %key.escape_ascii(), "there is no room for a file");
            }
            key
        });
        filled.0.insert(store.to_owned(), keys.collect());
    }
    Ok(filled)
}

/// Returns a content store with its place, and the most bytes of its keys and contents.
fn part<'a>(shared: &'a Shared, name: &str) -> Result<(&'a Part, (Table, usize, usize)), String> {
    let stores = || shared.layout.parts.iter().filter_map(|part| Some((part, part.contents()?)));
    stores().find(|(part, _)| part.name == name).ok_or_else(|| {
        let names: Vec<&str> = stores().map(|(part, _)| part.name.as_str()).collect();
        match names.is_empty() {
            true => "the service has no content store (SHUNT_CONTENTS)".to_owned(),
            false => format!("the service has no content store {name}; there are: {}", names.join(", ")),
        }
    })
}

/// Reads a file, or the files of a directory.
fn collect(path: &Path, found: &mut Contents, most: usize, room: usize) -> Result<(), String> {
    let of = |error: std::io::Error, path: &Path| format!("{}: {error}", path.display());
    let mut read = |path: &Path, key: Vec<u8>| {
        if key.len() > most {
            return Err(format!("{}: a key of the store has {most} bytes at most", path.display()));
        }
        let length = std::fs::metadata(path).map_err(|error| of(error, path))?.len();
        if length > room as u64 {
            return Err(format!("{}: {length} bytes; a content has {room} at most", path.display()));
        }
        let bytes = std::fs::read(path).map_err(|error| of(error, path))?;
        found.insert(key, bytes);
        Ok(())
    };
    if !path.is_dir() {
        let name = path.file_name().ok_or_else(|| format!("{} has no name", path.display()))?;
        return read(path, name.as_encoded_bytes().to_vec());
    }
    let mut directories = vec![(path.to_owned(), 0)];
    while let Some((directory, level)) = directories.pop() {
        if level > LEVELS {
            return Err(format!("{}: more than {LEVELS} levels of directories", directory.display()));
        }
        for entry in std::fs::read_dir(&directory).map_err(|error| of(error, &directory))? {
            let entry = entry.map_err(|error| of(error, &directory))?.path();
            if entry.is_dir() {
                directories.push((entry, level + 1));
            } else {
                let key = entry.strip_prefix(path).expect("inside").as_os_str().as_encoded_bytes().to_vec();
                read(&entry, key)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_their_paths_as_keys() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("css")).unwrap();
        std::fs::write(directory.path().join("index"), "one\n").unwrap();
        std::fs::write(directory.path().join("css/site"), "two\n").unwrap();
        let mut found = BTreeMap::new();
        collect(directory.path(), &mut found, 8, 4).unwrap();
        collect(&directory.path().join("index"), &mut found, 8, 4).unwrap();
        let keys: Vec<String> = found.keys().map(|key| key.escape_ascii().to_string()).collect();
        assert_eq!(keys, ["css/site", "index"]);
        assert_eq!(found[&b"index"[..]], b"one\n");
        let why = collect(directory.path(), &mut found, 7, 4).unwrap_err();
        assert!(why.contains("7 bytes at most"), "{why}");
        let why = collect(directory.path(), &mut found, 8, 3).unwrap_err();
        assert!(why.contains("3 at most"), "{why}");
        assert!(collect(&directory.path().join("none"), &mut found, 8, 4).is_err());
    }

    #[test]
    fn a_store_and_a_path_are_needed() {
        assert_eq!("a=b=c".parse(), Ok(Files { store: "a".to_owned(), path: "b=c".into() }));
        assert!("a".parse::<Files>().is_err() && "=b".parse::<Files>().is_err());
    }
}
