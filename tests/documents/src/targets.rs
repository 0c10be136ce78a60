//! The tests of every package, read from its sources in the way cargo and rustc do.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::{read, root};

/// The tests of one package: of each target, the paths by which a filter of `cargo test` selects
/// them.
#[derive(Default)]
pub struct Package {
    /// Unit tests of the library and of binaries.
    pub units: Vec<String>,
    /// Tests of each file in `tests`, by its name.
    pub integration: BTreeMap<String, Vec<String>>,
    /// The number of examples in its documentation.
    pub examples: usize,
}

/// Returns the packages of the workspace, by name.
pub fn packages() -> BTreeMap<String, Package> {
    let root = root();
    // A product's folder holds one package, or several.
    let folders = ["crates", "tests"].into_iter().flat_map(|folder| directory(&root.join(folder)));
    let members = folders.flat_map(|folder| directory(&folder).into_iter().chain([folder]));
    let manifests = members.map(|member| member.join("Cargo.toml")).filter(|manifest| manifest.exists());
    manifests
        .map(|manifest| (name(&manifest), package(manifest.parent().expect("it is in a folder"))))
        .collect()
}

fn name(manifest: &Path) -> String {
    let text = read(manifest);
    let name = text.lines().find_map(|line| line.strip_prefix("name = \""));
    name.and_then(|name| name.strip_suffix('"')).expect("a package has a name").to_owned()
}

fn package(folder: &Path) -> Package {
    let mut found = Package::default();
    let roots = ["lib.rs", "main.rs"].map(|name| folder.join("src").join(name));
    let binaries = directory(&folder.join("src/bin"));
    for file in roots.into_iter().chain(binaries).filter(|file| file.is_file()) {
        collect(&file, &[], &mut found.units);
        found.examples += examples(&file);
    }
    for entry in directory(&folder.join("tests")) {
        let file = if entry.is_dir() { entry.join("main.rs") } else { entry.clone() };
        if !file.is_file() || file.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let name = entry.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        collect(&file, &[], found.integration.entry(name).or_default());
    }
    found
}

/// Collects the tests of a file and of the modules that it declares.
fn collect(file: &Path, modules: &[String], found: &mut Vec<String>) {
    let text = read(file);
    let mut attribute = None;
    let mut is_test = false;
    // The modules that are written out in this file, with the indentation of their line.
    let mut inline: Vec<(usize, String)> = Vec::new();
    for line in text.lines() {
        let code = line.trim_start();
        let indentation = line.len() - code.len();
        if code.starts_with('}') {
            inline.retain(|(outer, _)| *outer < indentation);
        }
        let path = |last: &str| {
            let names = modules.iter().chain(inline.iter().map(|(_, name)| name)).map(String::as_str);
            names.chain([last]).collect::<Vec<_>>().join("::")
        };
        if let Some(path) = code.strip_prefix("#[path = \"").and_then(|rest| rest.split('"').next()) {
            attribute = Some(file.parent().expect("a file is in a folder").join(path));
        } else if code.starts_with("#[") || code.starts_with("//") || code.is_empty() {
            is_test |= ["#[test]", "#[tokio::test", "$(#[test]"].iter().any(|test| code.starts_with(test));
        } else if let Some((name, is_here)) = module(code) {
            if is_here {
                inline.push((indentation, name.to_owned()));
            } else {
                let below: Vec<_> = inline.iter().map(|(_, name)| name.as_str()).collect();
                let at = attribute.take().unwrap_or_else(|| file_of(file, modules.is_empty(), &below, name));
                let full = path(name);
                let full: Vec<_> = full.split("::").map(str::to_owned).collect();
                if at.is_file() {
                    collect(&at, &full, found);
                }
            }
            is_test = false;
        } else {
            if let Some(name) = function(code).filter(|_| is_test) {
                found.push(path(name));
            }
            is_test = false;
        }
    }
}

/// Returns the name of the module that a line declares, and whether its contents follow.
fn module(code: &str) -> Option<(&str, bool)> {
    let visible = code.strip_prefix("pub(crate) ").or_else(|| code.strip_prefix("pub(super) "));
    let code = visible.or_else(|| code.strip_prefix("pub ")).unwrap_or(code);
    let rest = code.strip_prefix("mod ")?;
    let name = &rest[..rest.find(|char: char| !char.is_alphanumeric() && char != '_')?];
    match rest[name.len()..].trim() {
        ";" => Some((name, false)),
        "{" => Some((name, true)),
        _ => None,
    }
}

fn function(code: &str) -> Option<&str> {
    let rest = code.split_once("fn ")?.1;
    rest.split(|char: char| !char.is_alphanumeric() && char != '_').next()
}

/// Returns the file of the module `name` that `file` declares within its modules `below`.
fn file_of(file: &Path, is_root: bool, below: &[&str], name: &str) -> PathBuf {
    let folder = file.parent().expect("a file is in a folder");
    let is_named_after_folder = is_root || file.file_name().is_some_and(|name| name == "mod.rs");
    let mut folder = if is_named_after_folder { folder.to_owned() } else { file.with_extension("") };
    folder.extend(below);
    let beside = folder.join(format!("{name}.rs"));
    if beside.is_file() { beside } else { folder.join(name).join("mod.rs") }
}

/// Returns the number of examples in the documentation of a file and of what stands beside and
/// below it.
fn examples(root: &Path) -> usize {
    let mut files = vec![root.parent().expect("a file is in a folder").to_owned()];
    let mut count = 0;
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(directory(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = read(&path);
            let fences = text.lines().filter(|line| {
                let comment = line.trim_start();
                comment.starts_with("/// ```") || comment.starts_with("//! ```")
            });
            count += fences.count() / 2 + text.matches("#[cfg(doctest)]").count();
        }
    }
    count
}

fn directory(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}
