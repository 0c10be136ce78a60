//! The words of documents, and how many there are. Words that the glossary has replaced do not come
//! back: each folder has at most as many lines with one as `tests/documents/vocabulary.txt` says. A
//! change that rewrites some lowers the number there.

use std::collections::BTreeMap;
use std::path::Path;

use shunt_documents::vocabulary::{folder, prose, replaced};
use shunt_documents::{files, read, root};

/// The page that lists the words.
const GLOSSARY: &str = "docs/glossary.md";

fn allowed() -> BTreeMap<String, usize> {
    let text = read(Path::new("tests/documents/vocabulary.txt"));
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines
        .map(|line| {
            let (count, folder) = line.trim().split_once(' ').expect("a count and a folder");
            (folder.to_owned(), count.parse().expect("a count"))
        })
        .collect()
}

#[test]
fn no_folder_has_more_lines_with_replaced_words_than_before() {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in files().into_iter().filter(|path| path != Path::new(GLOSSARY)) {
        let Ok(text) = std::fs::read_to_string(root().join(&path)) else { continue };
        for (at, line) in text.lines().enumerate() {
            let words: Vec<String> = prose(&path, line).into_iter().flat_map(replaced).collect();
            if !words.is_empty() {
                let place = format!("{}:{}: {}", path.display(), at + 1, words.join(", "));
                found.entry(folder(&path)).or_default().push(place);
            }
        }
    }
    let allowed = allowed();
    let more: Vec<_> = found
        .iter()
        .filter(|(folder, lines)| lines.len() > allowed.get(*folder).copied().unwrap_or(0))
        .map(|(folder, lines)| format!("{} {folder}\n  {}", lines.len(), lines.join("\n  ")))
        .collect();
    assert!(more.is_empty(), "{GLOSSARY} has other words for these:\n{}", more.join("\n"));
    let fewer: Vec<_> = allowed
        .iter()
        .filter(|(folder, count)| found.get(*folder).map_or(0, Vec::len) < **count)
        .map(|(folder, _)| format!("{} {folder}", found.get(folder).map_or(0, Vec::len)))
        .collect();
    assert!(fewer.is_empty(), "lower the counts in tests/documents/vocabulary.txt:\n{}", fewer.join("\n"));
}

/// A newcomer reads all of it. What is longer belongs to a page of the book.
#[test]
fn the_readme_has_fewer_than_600_words() {
    let words = read(Path::new("README.md")).split_whitespace().count();
    assert!(words < 600, "README.md has {words} words");
}
