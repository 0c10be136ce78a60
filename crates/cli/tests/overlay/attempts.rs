//! Compares the outcomes of `attack.c` with attempts.md, which lists the attempts of a hostile program
//! with a socket of the host network.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Returns the hostile program. It is compiled statically, once. Where there is no compiler,
/// `ATTACK` names a compiled one.
pub(crate) fn attack() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(built) = std::env::var_os("ATTACK") {
            return built.into();
        }
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

/// How a program is confined. These are the columns of the page.
#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "not every test has each of them")]
pub(crate) enum Kept {
    /// It runs under `shunt overlay run`.
    UnderFilter,
    /// It runs outside the filter, and has received the socket.
    Outside,
    /// Like `Outside`, on a kernel with BPF LSM. The page has a separate table of the differences.
    OutsideWithLsm,
}

/// An attempt on the page: its outcome under `shunt overlay run`, its outcome for a program outside
/// the filter, and the mechanism that stops it.
struct Row {
    name: String,
    filtered: String,
    given: String,
    stops: String,
}

const PAGE: &str = include_str!("attempts.md");

/// Returns the attempts of the table that begins with `head`. A row lists all that have the same
/// outcomes.
fn cells(head: &str) -> Vec<Vec<String>> {
    let table = PAGE.split(head).nth(1).expect("the table");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with("| "));
    rows.flat_map(|row| {
        let cells = row.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`'));
        let (names, outcomes) = (cells.clone().next().unwrap(), cells.skip(1));
        let attempt = |name| std::iter::once(name).chain(outcomes.clone()).map(str::to_owned).collect();
        names.split("`, `").map(attempt).collect::<Vec<_>>()
    })
    .collect()
}

/// Returns the rows of the page's main table.
fn listed() -> Vec<Row> {
    cells("| attempt |")
        .into_iter()
        .map(|row| {
            let [name, filtered, given, stops] = row.try_into().expect("four columns");
            // An empty cell repeats the column before it.
            let given = if given.is_empty() { filtered.clone() } else { given };
            Row { name, filtered, given, stops }
        })
        .collect()
}

/// Returns the expected outcome of each attempt.
fn expected(page: &[Row], kept: Kept) -> BTreeMap<String, String> {
    let column = |row: &Row| if kept == Kept::UnderFilter { &row.filtered } else { &row.given }.clone();
    let mut expected: BTreeMap<_, _> = page.iter().map(|row| (row.name.clone(), column(row))).collect();
    assert_eq!(page.len(), expected.len(), "no attempt is listed twice");
    if kept == Kept::OutsideWithLsm {
        for row in cells("| attempt outside the filter |") {
            let [name, given] = row.try_into().expect("two columns");
            let before = expected.insert(name.clone(), given.clone());
            assert!(
                before.is_some_and(|before| before != given),
                "it is in the other table, and differs: {name}"
            );
        }
    }
    expected
}

/// Asserts that the outcomes in the program's output equal those on the page.
pub(crate) fn compare(said: &str, kept: Kept) {
    assert!(said.ends_with("done\n"), "{said}");
    let page = listed();
    let expected = expected(&page, kept);
    let tried: BTreeMap<&str, &str> = said.lines().filter_map(|line| line.split_once('\t')).collect();
    let differ: Vec<_> =
        tried.iter().filter(|(name, got)| expected.get(**name).map(String::as_str) != Some(*got)).collect();
    let missing: Vec<_> = expected.keys().filter(|name| !tried.contains_key(name.as_str())).collect();
    assert!(
        differ.is_empty() && missing.is_empty(),
        "attempts.md says otherwise of {differ:#?}, and lists {missing:#?}"
    );
    assert!(page.iter().all(|row| !row.stops.is_empty()), "each row says what stops it");
}
