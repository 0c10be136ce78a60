//! The text of `shunt doctor` about programs that shunt does not serve.

use std::fmt::Write;

use crate::explain::Cause;
use crate::explain::unserved::{AllUnserved, Unserved};
use crate::screen::{Screen, Tone};
use crate::table::{Column, left, right};

/// The most programs that the text lists. `--json` has more.
const SHOWN: usize = 20;
/// The most addresses of a program in the table.
const ADDRESSES: usize = 2;

const COLUMNS: [Column; 6] = [
    left("PROGRAM", 0).shortened_to(10),
    left("PID", 2),
    left("WHERE", 3).shortened_to(12),
    left("LISTENS", 4),
    right("CONNECTIONS", 5),
    left("REASON", 1),
];

/// Returns the section, or nothing if every program is served.
pub(super) fn text(all: &AllUnserved, screen: &Screen, is_root: bool) -> String {
    let mut text = String::new();
    let shown = &all.programs[..all.programs.len().min(SHOWN)];
    if !shown.is_empty() {
        let title = "Programs with TCP on this host that are not served:";
        let _ = writeln!(text, "{}", screen.paint(title, Tone::Title));
        let rows: Vec<Vec<String>> = shown.iter().map(row).collect();
        text += &screen.table(&COLUMNS, &rows, |_, _| Tone::Plain);
    }
    let mut line = |line: String| text += &(screen.wrap(&line, 0, 2) + "\n");
    let more = all.programs.len() - shown.len() + all.left_out;
    if more > 0 {
        line(format!("{more} more are not shown; `shunt doctor --json` has up to 1000."));
    }
    // Root sees all programs of this host. Those of other PID namespaces cannot be seen from here.
    if all.hidden_listeners > 0 && !is_root {
        let sockets = if all.hidden_listeners == 1 { "socket" } else { "sockets" };
        line(format!(
            "The programs of {} listening {sockets} of others are not known: `sudo shunt doctor`.",
            all.hidden_listeners
        ));
    }
    let mut explained: Vec<&str> = Vec::new();
    for Unserved { program, cause, .. } in shown {
        let Cause { label, explanation, advice } = cause;
        if explained.contains(&&**label) {
            continue;
        }
        explained.push(label);
        let same = shown.iter().filter(|other| other.cause.label == *label);
        let example = match same.clone().all(|other| other.cause.advice == *advice) {
            true => String::new(),
            false => format!(" (for {program})"),
        };
        let painted = screen.paint(label, Tone::Title);
        let _ = writeln!(text, "{painted}{}", screen.wrap(&format!(": {explanation}"), label.len(), 2));
        let advice = format!("What to do{example}: {advice}");
        let _ = writeln!(text, "  {}", screen.wrap(&advice, 2, 2));
    }
    text
}

fn row(one: &Unserved) -> Vec<String> {
    let pid = match one.pids[..] {
        [pid] => pid.to_string(),
        [pid, ref rest @ ..] => format!("{pid} and {} more", rest.len()),
        [] => String::new(),
    };
    let place = match (&one.container, &one.service) {
        (Some(container), _) => container.name(),
        (None, Some(service)) => service.clone(),
        (None, None) => String::new(),
    };
    let mut listens: Vec<String> = one.listens.iter().take(ADDRESSES).map(ToString::to_string).collect();
    if one.listens.len() > ADDRESSES {
        listens.push("...".into());
    }
    vec![
        shunt_abi::shown::visible(&one.program).into_owned(),
        pid,
        place,
        listens.join(" "),
        one.connections.to_string(),
        one.cause.label.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unserved(program: &str, pids: &[u32]) -> Unserved {
        Unserved {
            program: program.into(),
            pids: pids.to_vec(),
            container: None,
            service: None,
            listens: vec!["127.0.0.1:80".parse().unwrap()],
            connections: 2,
            cause: Cause {
                label: "not_preloaded".into(),
                explanation: "It is so.".into(),
                advice: format!("Start {program}."),
            },
        }
    }

    #[test]
    fn cause_is_explained_once_with_an_example() {
        let all = AllUnserved {
            programs: vec![unserved("nginx", &[7, 8, 9]), unserved("redis", &[5])],
            left_out: 0,
            hidden_listeners: 1,
        };
        assert_eq!(
            text(&all, &Screen::default(), false),
            "Programs with TCP on this host that are not served:\n\
             PROGRAM  PID           WHERE  LISTENS       CONNECTIONS  REASON\n\
             nginx    7 and 2 more         127.0.0.1:80            2  not_preloaded\n\
             redis    5                    127.0.0.1:80            2  not_preloaded\n\
             The programs of 1 listening socket of others are not known: `sudo shunt doctor`.\n\
             not_preloaded: It is so.\n  \
               What to do (for nginx): Start nginx.\n"
        );
        assert_eq!(text(&AllUnserved::default(), &Screen::default(), false), "");
    }

    #[test]
    fn list_is_bounded() {
        let programs = (0..100).map(|number| unserved(&format!("p{number}"), &[number])).collect();
        let all = AllUnserved { programs, left_out: 3, hidden_listeners: 0 };
        let text = text(&all, &Screen::default(), false);
        assert!(text.contains("\n83 more are not shown; "), "{text}");
        assert!(text.lines().count() < 30, "{text}");
    }
}
