//! Helpers for tests of commands that write an HTML page.

use std::process::Command;

use crate::common::Shell;

/// Lets the command write a page, and run in a directory that it must leave empty.
pub(crate) fn writes(shell: &Shell, mut command: Command, arguments: &[&str]) -> Command {
    let place = shell.path("place");
    std::fs::create_dir_all(&place).unwrap();
    command.args(arguments).arg("--out").arg(shell.path("page.html"));
    command.current_dir(shell.path("")).env("TMPDIR", place);
    command
}

#[track_caller]
pub(crate) fn nothing_is_left(shell: &Shell) {
    assert_eq!((shell.within().len(), shell.brokers().len()), (0, 0));
    assert_eq!(std::fs::read_dir(shell.path("place")).unwrap().count(), 0);
    let hidden = std::fs::read_dir(shell.path("")).unwrap().flatten();
    assert!(!hidden.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with('.')));
}

/// Returns the page, after an XML parser has accepted it.
pub(crate) fn page(shell: &Shell) -> String {
    let path = shell.path("page.html");
    let read = "import sys, xml.etree.ElementTree as tree; tree.parse(sys.argv[1])";
    let output = Command::new("python3").args(["-c", read]).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read_to_string(path).unwrap()
}
