//! What a hostile program tries with a socket of the host's network, and what docs/security.md says that it gets: each row of the page is
//! an attempt of `attack.c`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The hostile program, static, built once.
pub(crate) fn attack() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("attack");
        let mut gcc = Command::new("gcc");
        gcc.args(["-static", "-pthread", "-O1", "-Wall", "-Wextra", "-Werror", "-x", "c", "-", "-o"])
            .arg(&program);
        let mut gcc = gcc.stdin(Stdio::piped()).spawn().expect("gcc is there");
        gcc.stdin.take().unwrap().write_all(include_bytes!("attack.c")).unwrap();
        assert!(gcc.wait().unwrap().success());
        program
    })
}

/// Columns of the page.
pub(crate) const UNDER_FILTER: usize = 0;
#[allow(dead_code, reason = "not every test has such a program")]
pub(crate) const OUTSIDE: usize = 1;

/// A row of the page: what the program gets under `shunt overlay run`, and what one that is not gets, and what stops it.
type Row = (String, [String; 3]);

/// The page's table.
fn listed() -> Vec<Row> {
    let page = include_str!("../../../../docs/security.md");
    let table = page.split("| attempt |").nth(1).expect("the table");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with("| "));
    let cells = |row: &str| -> Vec<String> {
        row.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    rows.map(|row| {
        let [name, filtered, given, stops] = cells(row).try_into().expect(row);
        // The same as in the column before.
        let given = if given.is_empty() { filtered.clone() } else { given };
        (name, [filtered, given, stops])
    })
    .collect()
}

/// Whether what the program has said of each attempt is what a column of the page says.
pub(crate) fn compare(said: &str, column: usize) {
    assert!(said.ends_with("done\n"), "{said}");
    let page = listed();
    let of_page: BTreeMap<&str, &str> =
        page.iter().map(|(name, cells)| (name.as_str(), cells[column].as_str())).collect();
    let tried: BTreeMap<&str, &str> = said.lines().filter_map(|line| line.split_once('\t')).collect();
    assert_eq!(page.len(), of_page.len(), "no attempt is listed twice");
    let differ: Vec<_> = tried.iter().filter(|(name, got)| of_page.get(*name) != Some(*got)).collect();
    let missing: Vec<_> = of_page.keys().filter(|name| !tried.contains_key(*name)).collect();
    assert!(
        differ.is_empty() && missing.is_empty(),
        "docs/security.md says otherwise of {differ:#?}, and lists {missing:#?}"
    );
    assert!(page.iter().all(|(_, cells)| !cells[2].is_empty()), "each row says what stops it");
}
