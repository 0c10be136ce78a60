//! Finds words in comments and documents that the glossary (docs/glossary.md) has replaced.

use std::path::{Component, Path};

/// Words that no comment and no document needs: see the last table of docs/glossary.md.
const REPLACED: &[&str] = &[
    "bereaved",
    "errand",
    "errands",
    "everybody",
    "hollow",
    "lamp",
    "mend",
    "mended",
    "mends",
    "nobody",
    "owe",
    "owed",
    "owes",
    "rinse",
    "rinsed",
    "road",
    "roads",
    "somebody",
    "soiled",
    "told",
    "tells",
    "unheard",
    "whoever",
    "whom",
    "whomever",
];

/// Returns the replaced words in a line of prose, code spans left out.
pub fn replaced(prose: &str) -> impl Iterator<Item = String> {
    let outside: String = prose.split('`').step_by(2).collect::<Vec<_>>().join(" ");
    let words: Vec<String> = outside
        .split(|char: char| !char.is_alphanumeric() && char != '_')
        .map(str::to_lowercase)
        .filter(|word| REPLACED.contains(&word.as_str()))
        .collect();
    words.into_iter()
}

/// Returns the prose of a line: of a document everything, of a source the comment.
pub fn prose<'a>(path: &Path, line: &'a str) -> Option<&'a str> {
    let marks: &[&str] = match path.extension()?.to_str()? {
        // Neither code nor a command, whose words have a meaning of their own.
        "md" => return (!line.starts_with("    ") && !line.starts_with("$ ")).then_some(line),
        "rs" | "c" | "h" | "go" | "java" => &["//", "* ", "/*"],
        "py" | "sh" => &["#"],
        _ => return None,
    };
    let line = line.trim_start();
    let is_comment = marks.iter().any(|mark| line.starts_with(mark)) && !line.starts_with("#!");
    is_comment.then_some(line)
}

/// Returns the folder that a file is counted under: two levels, or one for files at the top.
pub fn folder(path: &Path) -> String {
    let parts: Vec<_> = path
        .parent()
        .into_iter()
        .flat_map(Path::components)
        .filter_map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        })
        .take(2)
        .collect();
    if parts.is_empty() { ".".to_owned() } else { parts.join("/") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_prose_alone() {
        let found = |path: &str, line: &str| -> Vec<String> {
            prose(Path::new(path), line).into_iter().flat_map(replaced).collect()
        };
        assert_eq!(found("a.rs", "    /// Tells whoever asks."), ["tells", "whoever"]);
        assert_eq!(found("a.rs", "    let road = 1; // the road"), [""; 0]);
        assert_eq!(found("a.rs", "// `road` is a name"), [""; 0]);
        assert_eq!(found("a.md", "the road"), ["road"]);
        assert_eq!(found("a.md", "    road"), [""; 0]);
        assert_eq!(found("a.py", "# Nobody"), ["nobody"]);
        assert_eq!(found("a.py", "#!/usr/bin/env road"), [""; 0]);
        assert_eq!(found("a.toml", "# road"), [""; 0]);
    }

    #[test]
    fn files_are_counted_by_two_levels() {
        assert_eq!(folder(Path::new("README.md")), ".");
        assert_eq!(folder(Path::new("docs/usage.md")), "docs");
        assert_eq!(folder(Path::new("crates/local/shim/src/epoll/mod.rs")), "crates/local");
    }
}
