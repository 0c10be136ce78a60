//! Compares the state tables of docs/registration.md with the code, for the tests of the state
//! machines in this folder.

use std::path::{Path, PathBuf};

/// Asserts that the section `heading` documents `states`, and exactly the transitions of the code.
/// `next` returns the state that follows when one of `events` occurs in the state of this index.
///
/// A row of the transition table names its event in the parentheses at the end of its first field.
/// An empty field means that nothing changes. A field may say more about the state after a comma.
#[track_caller]
pub(super) fn check(
    heading: &str,
    states: &[&str],
    events: &[&str],
    next: impl Fn(&str, usize) -> &'static str,
) {
    let text = std::fs::read_to_string(page()).expect("docs/registration.md is there");
    let section = text.split("\n## ").find(|section| section.lines().next() == Some(heading));
    let section = section.unwrap_or_else(|| panic!("docs/registration.md has no section {heading:?}"));
    let rows: Vec<Vec<String>> = section.lines().filter(|line| line.starts_with('|')).map(fields).collect();
    let begin = rows.iter().position(|row| row[0] == "event").expect("a table of the transitions");
    let (meanings, transitions) = rows.split_at(begin);

    let described: Vec<&str> = meanings[2..].iter().map(|row| name(&row[0])).collect();
    assert_eq!(described, states, "{heading}: the table of the states");
    assert_eq!(transitions[0][1..], *states, "{heading}: the columns of the transitions");
    let documented: Vec<&str> = transitions[2..].iter().map(|row| event(&row[0])).collect();
    assert_eq!(documented, events, "{heading}: the events");
    for row in &transitions[2..] {
        for (place, state) in states.iter().enumerate() {
            let field = name(&row[place + 1]);
            let expected = if field.is_empty() { state } else { field };
            assert_eq!(next(event(&row[0]), place), expected, "{heading}: {} in {state}", row[0]);
        }
    }
}

/// Returns the path of docs/registration.md, in one of the folders above this crate.
fn page() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let page = above.map(|folder| folder.join("docs/registration.md")).find(|page| page.is_file());
    page.expect("docs/registration.md is in a folder above the crate")
}

/// Returns the fields of a table's row, without the marks of code.
fn fields(row: &str) -> Vec<String> {
    let inner = row.trim().trim_start_matches('|').trim_end_matches('|');
    inner.split('|').map(|field| field.trim().replace('`', "")).collect()
}

/// Returns the state that a field names.
fn name(field: &str) -> &str {
    field.split([',', '(']).next().unwrap_or_default().trim()
}

/// Returns the event that a field names.
fn event(field: &str) -> &str {
    field.rsplit_once('(').map_or("", |(_, event)| event.trim_end_matches(')'))
}
