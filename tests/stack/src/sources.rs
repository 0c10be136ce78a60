//! Finds the functions that shunt's source defines. The library lacks those that were inlined.

use std::fs;
use std::path::{Path, PathBuf};

/// Parts of the names of functions that come from other crates.
const FOREIGN: [&str; 5] = ["core::", "std::", "alloc::", "RawTable", "reserve_rehash"];

/// All source files of shunt's crates.
pub struct Sources(Vec<(String, String)>);

impl Sources {
    /// Reads the files.
    pub fn read() -> Sources {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
        let mut files = Vec::new();
        read_all(&crates, &mut files);
        assert!(!files.is_empty(), "there is no source in {}", crates.display());
        Sources(files)
    }

    /// Returns whether the source defines a function, a constant or a module with this path, by the
    /// last parts of the path. Returns true for names of other crates.
    pub fn define(&self, path: &str) -> bool {
        // A closure is defined within a function, and a method within a type of any name.
        let path = path.split("::{{").next().unwrap_or_default();
        if FOREIGN.iter().any(|foreign| path.contains(foreign)) {
            return true;
        }
        let path = path.trim_start_matches("drop_in_place<").trim_end_matches('>');
        let path = path.strip_prefix("shunt::").unwrap_or(path);
        let mut parts: Vec<&str> = path.split("::").filter(|part| !part.is_empty()).collect();
        let Some(name) = parts.pop() else { return true };
        let modules: Vec<_> = parts.into_iter().filter(|part| !part.contains(char::is_uppercase)).collect();
        let within = modules.join("/");
        let defines = |text: &str| {
            ["fn", "static", "const", "mod", "struct"].iter().any(|kind| {
                let definition = format!("{kind} {name}");
                text.match_indices(&definition).any(|(at, _)| {
                    let next = text[at + definition.len()..].chars().next();
                    next.is_none_or(|next| !next.is_alphanumeric() && next != '_')
                })
            })
        };
        let is_within =
            |file: &str| within.is_empty() || format!("/{file}/").contains(&format!("/{within}/"));
        self.0.iter().any(|(file, text)| is_within(file) && defines(text))
    }
}

/// Reads the files below a directory, each with its path as one of modules.
fn read_all(directory: &Path, files: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(directory).expect("a directory of source").flatten() {
        let path: PathBuf = entry.path();
        if path.is_dir() {
            read_all(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let modules = path.with_extension("").to_string_lossy().into_owned();
            files.push((modules, fs::read_to_string(&path).expect("text")));
        }
    }
}
