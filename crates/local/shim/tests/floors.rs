//! The layers of the shim. Checks that no path in its sources names a higher layer.

use std::fs;
use std::path::{Path, PathBuf};

/// The layers, from the lowest to the highest. Modules in one list are one layer.
const FLOORS: [&[&str]; 10] = [
    &["base"],
    &["socket"],
    &["epoll"],
    &["life"],
    &["broker"],
    &["program"],
    &["ops"],
    &["fork"],
    &["hooks"],
    &["intercept", "running"],
];

/// The layers within `base`.
const BASE: [&[&str]; 14] = [
    &["arch", "attempts", "errno", "names", "plan", "rank", "thread_cache", "undo_log", "upcall"],
    &["code", "hidden", "library", "order", "thread"],
    &["split"],
    &["unwind"],
    &["real"],
    &["by_number", "clib", "kernel"],
    &["lock"],
    &["process"],
    &["budget", "pace", "table"],
    &["private"],
    &["children", "panic", "waiter"],
    &["own_table", "signal"],
    &["alloc", "spin"],
    &["thread_end"],
];

fn floor_of(room: &str, floors: &[&[&str]]) -> Option<usize> {
    floors.iter().position(|floor| floor.contains(&room))
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// Returns the modules of `house` that a source names, outside its comments and tests.
fn rooms_named(source: &str, house: &str) -> Vec<String> {
    let code: String = source
        .split("\n#[cfg(test)]\nmod tests")
        .next()
        .unwrap()
        .lines()
        .map(|line| line.split("//").next().unwrap().to_owned() + "\n")
        .collect();
    let mut rooms = Vec::new();
    for rest in code.split(house).skip(1) {
        match rest.strip_prefix('{') {
            // A list of paths, which may contain lists.
            Some(list) => {
                let mut depth = 1;
                let mut first = String::new();
                for letter in list.chars() {
                    match letter {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        ',' if depth == 1 => rooms.push(std::mem::take(&mut first)),
                        _ if depth == 1 => first.push(letter),
                        _ => {}
                    }
                    if depth == 0 {
                        break;
                    }
                }
                rooms.push(first);
            }
            None => rooms.push(rest.to_owned()),
        }
    }
    let name = |path: &String| -> String {
        path.trim_start().chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect()
    };
    rooms.iter().map(name).collect()
}

/// Returns the paths in the sources under `directory` that name a higher layer, or another module
/// of the same layer. So no two modules depend on each other.
fn arrows_up(directory: &str, house: &str, floors: &[&[&str]], at_least: usize) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let mut sources = Vec::new();
    files(&root, &mut sources);
    let mut arrows = 0;
    let mut wrong = Vec::new();
    for path in sources {
        let inside = path.strip_prefix(&root).unwrap();
        let room = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if ["lib", "mod"].contains(&room) {
            continue;
        }
        let Some(own) = floor_of(room, floors) else { panic!("{room} is on no floor: put it on one, above") };
        for named in rooms_named(&fs::read_to_string(&path).unwrap(), house) {
            // Other names are those of macros or types in the root.
            let Some(floor) = floor_of(&named, floors) else { continue };
            arrows += 1;
            if floor > own || floor == own && named != room {
                wrong.push(format!("{} names {named}", inside.display()));
            }
        }
    }
    assert!(arrows > at_least, "only {arrows} paths have been found");
    wrong
}

#[test]
fn no_arrow_runs_back_up() {
    let wrong = arrows_up("src", "crate::", &FLOORS, 300);
    assert!(wrong.is_empty(), "a floor names one above it; see base/upcall.rs\n{}", wrong.join("\n"));
}

#[test]
fn nor_within_the_lowest_floor() {
    let wrong = arrows_up("src/base", "crate::base::", &BASE, 50);
    assert!(wrong.is_empty(), "see base/upcall.rs\n{}", wrong.join("\n"));
}

#[test]
fn paths_are_found_in_lists_and_in_the_middle_of_lines() {
    let source = "use crate::{epoll, life::{attach, idle}};\nuse crate::base::lock;\nfn f() { crate::ops::poll(); } // crate::intercept\n";
    assert_eq!(rooms_named(source, "crate::"), ["epoll", "life", "base", "ops"]);
}
