//! The details of one row of `shunt top`.

use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Span, Text};
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::shown::visible;
use shunt_abi::status::Direction;

use super::model::{End, Program};
use super::view::{of, speed};
use crate::explain::{Cause, causes_of};
use crate::table;

/// Describes one end of a connection, with why it is on TCP and what to do about it.
pub(super) fn of_end(end: &End, peer: Option<&End>, is_gone: bool) -> Text<'static> {
    let other = match peer {
        Some(peer) => format!(", with {} (pid {})", visible(&peer.program), peer.pid),
        None => String::new(),
    };
    let mut lines = vec![
        Line::from(format!("{} (pid {}), user {}", visible(&end.program), end.pid, end.uid)).bold(),
        Line::from(format!("{} to {}{other}", end.local, end.remote)),
    ];
    lines.push(match is_gone {
        true => Line::from("This connection has ended. Its last state was:").bold(),
        false => {
            Line::from(format!("moves {} by shared memory and {} by TCP", speed(end.shm), speed(end.tcp)))
        }
    });
    lines.push(Line::default());
    lines.push(direction("sends by", &end.row.send));
    lines.push(direction("receives by", &end.row.receive));
    lines.push(Line::default());
    let causes = causes_of(&end.row, peer.is_some());
    if causes.is_empty() {
        let is_young = [end.row.send, end.row.receive].iter().any(|one| one.transport == Transport::Tcp);
        lines.push(Line::from(match is_young {
            true => "Nothing keeps it on TCP: it is about to change to shared memory.",
            false => "It is on shared memory in both directions.",
        }));
    }
    causes.iter().for_each(|cause| explain(&mut lines, cause));
    Text::from(lines)
}

/// Describes a program, with the reasons that its connections have had for TCP.
pub(super) fn of_program(program: &Program, is_gone: bool) -> Text<'static> {
    let share = &program.totals.share;
    let name = visible(&program.program).into_owned();
    let mut lines = vec![Line::from(format!("{name} (pid {}), user {}", program.pid, program.uid)).bold()];
    if is_gone {
        lines.push(Line::from("This program has ended. Its last state was:").bold());
    }
    lines.extend([
        Line::from(format!(
            "open connection ends: {} on shared memory, {} with one direction on each, {} on TCP",
            program.on_shm, program.half, program.on_tcp
        )),
        Line::from(format!(
            "since its start: {} connection ends used, {} offered to the broker, {} on shared memory for a time",
            share.seen, share.offered, share.on_shm
        )),
        Line::from(format!(
            "moves {} by shared memory and {} by TCP",
            speed(program.rates.shm),
            speed(program.rates.tcp)
        )),
        Line::default(),
    ]);
    let named = |(label, count): (&String, &u64)| {
        let reason = Reason::ALL.iter().find(|reason| reason.label() == label)?;
        Some((*count, *reason))
    };
    let mut reasons: Vec<(u64, Reason)> = program.totals.bypasses.iter().filter_map(named).collect();
    reasons.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    if reasons.is_empty() {
        lines.push(Line::from("None of its connections has had a reason for TCP."));
    } else {
        lines.push(Line::from("Reasons that its connections have had for TCP, since its start:"));
    }
    for (count, reason) in reasons {
        lines.push(Line::from(if count == 1 { "once".into() } else { format!("{count} times") }));
        explain(&mut lines, &reason.into());
    }
    Text::from(lines)
}

fn direction(what: &'static str, direction: &Direction) -> Line<'static> {
    let name = if direction.transport == Transport::Shm { "shared memory" } else { "TCP" };
    let so_far = format!(
        ": so far {} by shared memory, {} by TCP",
        table::bytes(direction.shm_bytes),
        table::bytes(direction.tcp_bytes)
    );
    Line::from(vec![
        Span::raw(format!("{what:<12}")),
        Span::styled(name, of(direction.transport)),
        Span::raw(so_far),
    ])
}

fn explain(lines: &mut Vec<Line<'static>>, cause: &Cause) {
    lines.push(Line::from(vec![
        Span::styled(cause.label.clone().into_owned(), Style::new().bold()),
        Span::raw(format!(": {}", visible(&cause.explanation))),
    ]));
    lines.push(Line::from(format!("  What to do: {}", visible(&cause.advice))));
}
