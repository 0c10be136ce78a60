//! Draws the display.
//!
//! What does not fit is left out whole, the least important first: columns of tables, and parts of
//! the other lines.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, Wrap};
use shunt_abi::reason::Transport;
use shunt_abi::shown::visible;

use super::app::{App, Item, Rows};
use super::details;
use super::model::{End, Look, Program, Rates};
use crate::table::{self, Column, left, right};

const HELP: &str = "\
Tab, p, c   programs, or ends of connections
arrows      select a row; PgUp, PgDn, Home and End too
Enter       details of the selected row: the reason for TCP and what to do; back
s, S        sort by the next column, or the one before; it is underlined
r           sort the other way round
/           show only rows with what you type; Enter keeps it, Esc drops it
l           latency of connections, or not: programs measure it while it is shown
space       pause, or go on
u           update now
h, ?        this
q           leave

SHM, MIXED and TCP count ends of connections: on shared memory, one direction on each, on TCP.
WITHIN is the time from a request to its answer that half of them and 99 % of them did not exceed,
at the end that has connected; it is unknown until an answer comes.
BY SHM and BY TCP are what they send and receive: between two programs under shunt both count it.
SPIN is time of threads that wait by polling: 1.00 is one processor.
Columns that do not fit are left out: a wider terminal shows them.";

pub(super) fn draw(app: &mut App, frame: &mut Frame<'_>) {
    let layout = [Constraint::Length(3), Constraint::Min(1), Constraint::Length(1)];
    let [head, body, foot] = Layout::vertical(layout).areas(frame.area());
    frame.render_widget(Paragraph::new(heading(app, head.width.into())), head);
    if app.helps {
        frame.render_widget(Paragraph::new(HELP).wrap(Wrap { trim: false }), body);
    } else if let Some(opened) = &app.opened {
        let text = match &opened.item {
            Item::Program(program) => details::of_program(program, opened.is_gone),
            Item::End(end) => details::of_end(end, app.peer(end), opened.is_gone),
        };
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }), body);
    } else {
        // The first line has the titles.
        let height = usize::from(body.height).saturating_sub(1).max(1);
        app.first = app.first.clamp((app.at + 1).saturating_sub(height), app.at);
        let table = match app.rows {
            Rows::Programs => programs(app, body),
            Rows::Connections => connections(app, body),
        };
        frame.render_widget(table, body);
    }
    frame.render_widget(Paragraph::new(footer(app, foot.width.into())), foot);
}

/// Joins the parts that fit. Those with the highest rank are left out first.
fn join(mut parts: Vec<(u8, Vec<Span<'static>>)>, between: &'static str, available: usize) -> Line<'static> {
    let width = |parts: &[(u8, Vec<Span<'static>>)]| {
        let texts: usize = parts.iter().flat_map(|(_, spans)| spans).map(Span::width).sum();
        texts + between.len() * parts.len().saturating_sub(1)
    };
    while width(&parts) > available {
        let ranks = parts.iter().enumerate();
        let Some(last) = ranks.max_by_key(|(_, (rank, _))| *rank).map(|(at, _)| at) else { break };
        parts.remove(last);
    }
    let mut joined = Line::default();
    for (at, (_, spans)) in parts.into_iter().enumerate() {
        if at > 0 {
            joined.push_span(Span::raw(between));
        }
        joined.extend(spans);
    }
    joined
}

fn links(look: &Look) -> String {
    let counted = format!("{} {}", look.links, if look.links == 1 { "link" } else { "links" });
    if look.has_earlier_links { counted + " since the restart" } else { counted }
}

fn heading(app: &App, available: usize) -> Text<'static> {
    let look = &app.look;
    let part = |rank, text: String| (rank, vec![Span::raw(text).bold()]);
    let mut first = vec![
        part(0, format!("broker {}", look.broker_pid)),
        part(2, format!("up {}", table::duration(look.uptime_seconds))),
        part(3, links(look)),
    ];
    if app.paused {
        first.push(part(1, "paused".into()));
    }
    let trouble = app.trouble.as_deref().map(|text| visible(text).into_owned()).unwrap_or_default();
    Text::from(vec![
        join(first, ", ", available),
        match look.seconds > 0.0 {
            true => join(traffic(&look.rates), ", ", available),
            false => Line::from("rates follow with the next snapshot"),
        },
        Line::from(trouble.fg(Color::Red)),
    ])
}

fn traffic(rates: &Rates) -> Vec<(u8, Vec<Span<'static>>)> {
    let all = rates.shm + rates.tcp;
    let share = if all > 0.0 { format!(" ({:.1} %)", rates.shm / all * 100.0) } else { String::new() };
    let by_shm = format!("{} by shared memory{share}", speed(rates.shm));
    let plain = |rank, text: String| (rank, vec![Span::raw(text)]);
    vec![
        (0, vec![Span::styled(by_shm, of(Transport::Shm))]),
        (1, vec![Span::styled(format!("{} by TCP", speed(rates.tcp)), of(Transport::Tcp))]),
        plain(2, format!("{:.0} sleeps/s", rates.sleeps)),
        plain(3, format!("{:.0} wake-ups/s", rates.wake_ups)),
        plain(4, format!("{:.2} processors spin", rates.spin)),
    ]
}

fn footer(app: &App, available: usize) -> Line<'static> {
    let filter = visible(&app.filter);
    if app.typing {
        return Line::from(format!("show only: {filter}_"));
    }
    let other = if app.rows == Rows::Programs { "connections" } else { "programs" };
    let filter = if app.filter.is_empty() { "filter".to_owned() } else { format!("only: {filter}") };
    let direction = if app.rises() { "up" } else { "down" };
    let keys = [
        (0, "q", "quit".to_owned()),
        (3, "Tab", other.to_owned()),
        (2, "Enter", if app.opened.is_some() { "back" } else { "details" }.to_owned()),
        (4, "s", format!("by {}", app.sort.label())),
        (6, "r", direction.to_owned()),
        (5, "/", filter),
        (7, "space", if app.paused { "go on" } else { "pause" }.to_owned()),
        (1, "h", "help".to_owned()),
    ];
    let part = |(rank, key, what): (u8, &'static str, String)| {
        (rank, vec![Span::styled(key, Modifier::REVERSED), Span::raw(format!(" {what}"))])
    };
    join(keys.into_iter().map(part).collect(), "  ", available)
}

const PROGRAMS: [Column; 11] = [
    left("PROGRAM", 0).shortened_to(10),
    right("PID", 3),
    right("USER", 10),
    right("SHM", 4),
    right("MIXED", 6),
    right("TCP", 5),
    right("BY SHM", 1),
    right("BY TCP", 2),
    right("SLEEPS/S", 7),
    right("WAKE-UPS/S", 8),
    right("SPIN", 9),
];

const CONNECTIONS: [Column; 9] = [
    left("PROGRAM", 0).shortened_to(10),
    right("PID", 6),
    left("LOCAL", 5),
    left("REMOTE", 1),
    left("SENDS", 7),
    left("RECEIVES", 8),
    right("BY SHM", 2),
    right("BY TCP", 3),
    left("WHY TCP", 4).shortened_to(12),
];

/// The columns of connections while latencies are shown.
const LATENCIES: [Column; 2] = [right("HALF WITHIN", 3), right("99 % WITHIN", 2)];

type Texts = Vec<(String, Style)>;

fn programs(app: &App, area: Rect) -> Table<'static> {
    let some = |count: usize, transport| if count > 0 { of(transport) } else { Style::new() };
    let row = |program: &Program| {
        let Program { program, pid, uid, on_shm, half, on_tcp, rates, .. } = program;
        vec![
            plain(visible(program).into_owned()),
            plain(pid.to_string()),
            plain(uid.to_string()),
            (on_shm.to_string(), some(*on_shm, Transport::Shm)),
            plain(half.to_string()),
            (on_tcp.to_string(), some(*on_tcp, Transport::Tcp)),
            plain(speed(rates.shm)),
            plain(speed(rates.tcp)),
            plain(format!("{:.0}", rates.sleeps)),
            plain(format!("{:.0}", rates.wake_ups)),
            plain(format!("{:.2}", rates.spin)),
        ]
    };
    lay_out(app, &PROGRAMS, app.programs().into_iter().map(row).collect(), area)
}

fn connections(app: &App, area: Rect) -> Table<'static> {
    let row = |end: &End| {
        let End { program, pid, local, remote, send, receive, why, shm, tcp, .. } = end;
        let mut cells = vec![
            plain(visible(program).into_owned()),
            plain(pid.to_string()),
            plain(local.to_string()),
            plain(remote.to_string()),
            (send.label().to_owned(), of(*send)),
            (receive.label().to_owned(), of(*receive)),
            plain(speed(*shm)),
            plain(speed(*tcp)),
            plain(why.clone()),
        ];
        if app.latency {
            let within = |share| match end.row.connected {
                true => plain(crate::status::within(&end.latency, share)),
                false => plain(String::new()),
            };
            cells.extend([within(0.5), within(0.99)]);
        }
        cells
    };
    let more: &[Column] = if app.latency { &LATENCIES } else { &[] };
    lay_out(app, &[&CONNECTIONS, more].concat(), app.connections().into_iter().map(row).collect(), area)
}

/// Computes the layout from all rows, including those outside the window. So columns do not move
/// when the user scrolls.
fn lay_out(app: &App, columns: &[Column], rows: Vec<Texts>, area: Rect) -> Table<'static> {
    let texts: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|(text, _)| text.clone()).collect()).collect();
    let natural = table::natural_widths(columns, &texts);
    let widths = table::fit(columns, &natural, area.width.into());
    let shown: Vec<(usize, usize)> =
        widths.iter().enumerate().filter_map(|(at, width)| Some((at, (*width)?))).collect();
    let cell = |at: usize, width: usize, text: &str| {
        let text = Text::from(table::shorten(text, width));
        Cell::from(if columns[at].right { text.right_aligned() } else { text })
    };
    let title = |(at, width): &(usize, usize)| {
        let title = columns[*at].title;
        let sorted =
            if app.sort.titles().contains(&title) { Modifier::UNDERLINED } else { Modifier::empty() };
        cell(*at, *width, title).style(Style::new().add_modifier(sorted))
    };
    let head = Row::new(shown.iter().map(title).collect::<Vec<_>>());
    let visible = rows.into_iter().enumerate().skip(app.first).take(area.height.into());
    let visible = visible.map(|(index, row)| {
        let cells = shown.iter().map(|(at, width)| cell(*at, *width, &row[*at].0).style(row[*at].1));
        let row = Row::new(cells.collect::<Vec<_>>());
        if index == app.at { row.style(Modifier::REVERSED) } else { row }
    });
    let visible: Vec<Row<'static>> = visible.collect();
    let widths = shown.iter().map(|(_, width)| Constraint::Length(u16::try_from(*width).unwrap_or(u16::MAX)));
    let spacing = table::GAP as u16;
    Table::new(visible, widths.collect::<Vec<_>>()).header(head.style(Modifier::BOLD)).column_spacing(spacing)
}

fn plain(text: String) -> (String, Style) {
    (text, Style::new())
}

pub(super) fn speed(bytes: f64) -> String {
    format!("{}/s", table::bytes(bytes as u64))
}

/// Returns the style of a transport. Each transport has one colour everywhere; its name is always
/// shown as well.
pub(super) fn of(transport: Transport) -> Style {
    Style::new().fg(match transport {
        Transport::Shm => Color::Green,
        Transport::Tcp => Color::Yellow,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
    use shunt_abi::latency::{Histogram, Latency};
    use shunt_abi::reason::Reason;
    use shunt_abi::status::{Connection, Direction, Moved, Process, Share, Snapshot, Totals};

    use super::super::app::{Sort, Wish};
    use super::super::model::{self, Look};
    use super::*;

    const SHM: (Transport, Reason) = (Transport::Shm, Reason::None);
    const TCP: (Transport, Reason) = (Transport::Tcp, Reason::Fork);

    fn end(port: u16, (transport, reason): (Transport, Reason), bytes: u64) -> Connection {
        let direction = match transport {
            Transport::Shm => Direction { transport, reason, tcp_bytes: 0, shm_bytes: bytes },
            Transport::Tcp => Direction { transport, reason, tcp_bytes: bytes, shm_bytes: 0 },
        };
        Connection {
            cookie: port.into(),
            fd: 5,
            local: ([127, 0, 0, 1], port).into(),
            remote: ([127, 0, 0, 1], 80).into(),
            send: direction,
            receive: direction,
            option: None,
            connected: false,
            latency: Default::default(),
            ended_seconds_ago: None,
        }
    }

    fn process(pid: u32, program: &str, ends: Vec<Connection>, counts: u64) -> Process {
        let sum =
            |of: fn(&Direction) -> u64| ends.iter().map(|end| of(&end.send) + of(&end.receive)).sum::<u64>();
        let totals = Totals {
            share: Share::default(),
            bytes: Moved {
                shm: sum(|one| one.shm_bytes),
                tcp: [("fork".to_owned(), sum(|one| one.tcp_bytes))].into(),
            },
            counters: ["sleeps", "doorbells_rung"].map(|name| (name.to_owned(), counts)).into(),
            bypasses: BTreeMap::new(),
            latency: Default::default(),
        };
        Process {
            pid,
            uid: 1000,
            program: program.to_owned(),
            totals,
            connections: ends,
            left_out: 0,
            ended_connections: Vec::new(),
            ended_seconds_ago: None,
        }
    }

    fn snapshot(factor: u64) -> Snapshot {
        let processes = vec![
            process(
                41,
                "memca\x07",
                vec![end(11211, SHM, factor << 20), end(11212, TCP, factor << 10)],
                factor * 10,
            ),
            process(42, "idle", vec![end(7, TCP, 5)], 0),
        ];
        let mut totals = Totals::default();
        processes.iter().for_each(|process| totals += &process.totals);
        Snapshot {
            broker_pid: 7,
            uptime_seconds: 60 + factor,
            of_all: true,
            links: 1,
            totals,
            processes,
            ..Snapshot::default()
        }
    }

    fn app(keys: &str) -> App {
        let mut app = App::new(Rows::Programs, Sort::Rate, String::new());
        app.look = model::look(Some((&snapshot(1), Duration::from_secs(2))), &snapshot(3));
        for letter in keys.chars() {
            let code = match letter {
                '\t' => KeyCode::Tab,
                '\n' => KeyCode::Enter,
                letter => KeyCode::Char(letter),
            };
            app.press(KeyEvent::new(code, KeyModifiers::NONE));
        }
        app
    }

    fn screen(app: &mut App) -> Vec<String> {
        screen_of(app, 130, 8)
    }

    fn screen_of(app: &mut App, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(app, frame)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |row: &[ratatui::buffer::Cell]| {
            row.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
        };
        buffer.content.chunks(width.into()).map(line).collect()
    }

    #[test]
    fn programs_are_shown_with_what_they_move_in_a_second() {
        let expected = [
            "broker 7, up 1 min 3 s, 1 link",
            "2.00 MiB/s by shared memory (99.9 %), 2.00 KiB/s by TCP, 10 sleeps/s, 10 wake-ups/s, 0.00 processors spin",
            "",
            "PROGRAM     PID  USER  SHM  MIXED  TCP      BY SHM      BY TCP  SLEEPS/S  WAKE-UPS/S  SPIN",
            "memca\\u{7}   41  1000    1      0    1  2.00 MiB/s  2.00 KiB/s        10          10  0.00",
            "idle         42  1000    0      0    1       0 B/s       0 B/s         0           0  0.00",
            "",
            "q quit  Tab connections  Enter details  s by bytes/s  r down  / filter  space pause  h help",
        ];
        assert_eq!(screen(&mut app("")), expected);
    }

    #[test]
    fn connections_are_shown_with_their_transports_and_why() {
        let shown = screen(&mut app("\ts"));
        assert_eq!(
            shown[3..],
            [
                "PROGRAM     PID  LOCAL            REMOTE        SENDS  RECEIVES      BY SHM      BY TCP  WHY TCP",
                "memca\\u{7}   41  127.0.0.1:11211  127.0.0.1:80  shm    shm       2.00 MiB/s       0 B/s",
                "memca\\u{7}   41  127.0.0.1:11212  127.0.0.1:80  tcp    tcp            0 B/s  2.00 KiB/s  fork",
                "idle         42  127.0.0.1:7      127.0.0.1:80  tcp    tcp            0 B/s       0 B/s  fork",
                "q quit  Tab programs  Enter details  s by shared memory  r down  / filter  space pause  h help",
            ]
        );
    }

    #[test]
    fn rows_are_sorted_and_filtered_by_keys() {
        let names =
            |keys: &str| app(keys).programs().iter().map(|row| row.program.clone()).collect::<Vec<_>>();
        assert_eq!(names(""), ["memca\x07", "idle"]);
        assert_eq!(names("r"), ["idle", "memca\x07"]);
        assert_eq!(names("ssss"), ["idle", "memca\x07"], "by name");
        assert_eq!(names("ssssr"), ["memca\x07", "idle"], "by name, the last first");
        assert_eq!(names("sssSSS"), names(""), "S undoes s");
        assert_eq!(names("/MEM\n"), ["memca\x07"]);
        assert_eq!(names("/q"), Vec::<String>::new(), "what is typed is no key");
        assert!(screen(&mut app("/mem"))[7].starts_with("show only: mem_"));
        assert_eq!(app("\t/:7\n").connections().len(), 1);
        let mut app = app("");
        assert_eq!(app.press(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE)), Wish::Quit);
        assert_eq!(app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Wish::Quit);
    }

    #[test]
    fn connections_are_sorted_by_every_key_in_both_directions() {
        let ports = |sort, reversed| {
            let mut app = app("\t");
            (app.sort, app.reversed) = (sort, reversed);
            app.connections().iter().map(|end| end.local.port()).collect::<Vec<_>>()
        };
        for (sort, falling) in [
            (Sort::Rate, [11211, 11212, 7]),
            (Sort::Shm, [11211, 11212, 7]),
            (Sort::Tcp, [11212, 11211, 7]),
            (Sort::Program, [7, 11211, 11212]),
            (Sort::Pid, [11211, 11212, 7]),
            (Sort::Remote, [11211, 11212, 7]),
            (Sort::Reason, [11212, 7, 11211]),
        ] {
            assert_eq!(ports(sort, false), falling, "{sort:?}");
        }
        assert_eq!(ports(Sort::Tcp, true), [11211, 7, 11212]);
        assert_eq!(ports(Sort::Pid, true), [7, 11211, 11212]);
    }

    fn press(app: &mut App, code: KeyCode) {
        app.press(KeyEvent::new(code, KeyModifiers::NONE));
    }

    #[test]
    fn the_selected_row_is_always_in_sight() {
        let mut app = app("\t");
        for _ in 0..50 {
            press(&mut app, KeyCode::PageDown);
        }
        assert!(screen_of(&mut app, 130, 6)[4].contains("127.0.0.1:7 "), "only one row fits");
        press(&mut app, KeyCode::Up);
        assert!(screen_of(&mut app, 130, 6)[4].contains("127.0.0.1:11212 "));
        press(&mut app, KeyCode::Home);
        assert!(screen_of(&mut app, 130, 6)[4].contains("127.0.0.1:11211 "));
    }

    #[test]
    fn the_selected_row_stays_selected_when_rows_are_sorted_anew() {
        let mut app = app("\t");
        press(&mut app, KeyCode::End);
        assert_eq!(app.connections()[app.at].local.port(), 7);
        press(&mut app, KeyCode::Char('r'));
        assert_eq!((app.at, app.connections()[app.at].local.port()), (0, 7));
        let mut now = snapshot(5);
        now.processes.pop();
        app.take(model::look(Some((&snapshot(3), Duration::from_secs(1))), &now));
        assert_eq!(app.at, 0, "it is gone: what is in its place is selected");
    }

    #[test]
    fn details_have_the_reason_and_the_advice() {
        let mut app = app("\t");
        press(&mut app, KeyCode::Down);
        press(&mut app, KeyCode::Enter);
        let shown = screen_of(&mut app, 80, 14);
        assert_eq!(
            shown[3..12],
            [
                "memca\\u{7} (pid 41), user 1000",
                "127.0.0.1:11212 to 127.0.0.1:80",
                "moves 0 B/s by shared memory and 2.00 KiB/s by TCP",
                "",
                "sends by    TCP: so far 0 B by shared memory, 3.00 KiB by TCP",
                "receives by TCP: so far 0 B by shared memory, 3.00 KiB by TCP",
                "",
                "fork: The process forked while it held the connection.",
                "  What to do: No action needed: it is offered again when only one process holds",
            ]
        );
        let mut now = snapshot(5);
        now.processes.remove(0);
        app.take(model::look(Some((&snapshot(3), Duration::from_secs(1))), &now));
        assert!(screen_of(&mut app, 80, 14)[5].starts_with("This connection has ended."));
        press(&mut app, KeyCode::Esc);
        assert!(screen(&mut app)[3].starts_with("PROGRAM"));
    }

    #[test]
    fn details_name_the_program_at_the_other_end() {
        let mut now = snapshot(3);
        let mut other = end(80, TCP, 9);
        (other.local, other.remote) = (other.remote, ([127, 0, 0, 1], 11212).into());
        now.processes.push(process(43, "client", vec![other], 0));
        let mut app = app("\tss");
        app.take(model::look(None, &now));
        press(&mut app, KeyCode::Char('/'));
        "11212".chars().for_each(|letter| press(&mut app, KeyCode::Char(letter)));
        press(&mut app, KeyCode::Enter);
        press(&mut app, KeyCode::Enter);
        let shown = screen_of(&mut app, 80, 14);
        assert_eq!(shown[4], "127.0.0.1:11212 to 127.0.0.1:80, with client (pid 43)");
    }

    #[test]
    fn details_of_a_program_list_its_reasons() {
        let mut now = snapshot(3);
        now.processes[0].totals.bypasses = [("fork".to_owned(), 1), ("stdio".to_owned(), 12)].into();
        now.processes[0].totals.share = Share { seen: 20, offered: 8, on_shm: 7 };
        let mut app = app("");
        app.take(model::look(None, &now));
        press(&mut app, KeyCode::Home);
        press(&mut app, KeyCode::Enter);
        let shown = screen_of(&mut app, 140, 20).join("\n");
        for part in [
            "1 on shared memory, 0 with one direction on each, 1 on TCP",
            "20 connection ends used, 8 offered to the broker, 7 on shared memory",
            "12 times\nstdio: The descriptor was given to stdio",
            "once\nfork: ",
            "What to do: Use the socket without stdio",
        ] {
            assert!(shown.contains(part), "no {part:?} in {shown}");
        }
    }

    /// A busy host: what its numbers take is more than 80 and 100 columns have.
    fn busy(rows: Rows) -> App {
        let mut app = App::new(rows, Sort::Rate, String::new());
        let mut before = snapshot(1);
        before.processes = vec![process(4_194_304, "a-program-of-some-length", vec![end(65_535, SHM, 1)], 1)];
        let mut now = before.clone();
        let bytes = 123 << 30;
        now.processes =
            vec![process(4_194_304, "a-program-of-some-length", vec![end(65_535, SHM, bytes)], 1 << 30)];
        now.processes[0].uid = u32::MAX - 1;
        now.processes[0].connections[0].local =
            "[2001:db8:1111:2222:3333:4444:5555:6666]:65535".parse().unwrap();
        now.processes[0].connections[0].receive.reason = Reason::TooFewOperations;
        now.processes[0].connections[0].receive.transport = Transport::Tcp;
        now.totals = now.processes[0].totals.clone();
        app.take(model::look(Some((&before, Duration::from_secs(1))), &now));
        app
    }

    #[test]
    fn columns_that_do_not_fit_are_left_out_whole() {
        for (width, rows, head, row) in [
            (
                60,
                Rows::Programs,
                "PROGRAM              PID  SHM  MIXED  TCP     BY SHM  BY TCP",
                "a-program-of-s…  4194304    0      1    0  246 GiB/s   0 B/s",
            ),
            (
                80,
                Rows::Programs,
                "PROGRAM          PID  SHM  MIXED  TCP     BY SHM  BY TCP    SLEEPS/S  WAKE-UPS/S",
                "a-program-…  4194304    0      1    0  246 GiB/s   0 B/s  1073741823  1073741823",
            ),
            (
                100,
                Rows::Programs,
                "PROGRAM            PID        USER  SHM  MIXED  TCP     BY SHM  BY TCP    SLEEPS/S  WAKE-UPS/S  SPIN",
                "a-program-of…  4194304  4294967294    0      1    0  246 GiB/s   0 B/s  1073741823  1073741823  0.00",
            ),
            (
                140,
                Rows::Programs,
                "PROGRAM                       PID        USER  SHM  MIXED  TCP     BY SHM  BY TCP    SLEEPS/S  WAKE-UPS/S  SPIN",
                "a-program-of-some-length  4194304  4294967294    0      1    0  246 GiB/s   0 B/s  1073741823  1073741823  0.00",
            ),
            (
                60,
                Rows::Connections,
                "PROGRAM        REMOTE           BY SHM  BY TCP  WHY TCP",
                "a-program-of…  127.0.0.1:80  246 GiB/s   0 B/s  receives: t…",
            ),
            (
                80,
                Rows::Connections,
                "PROGRAM                   REMOTE           BY SHM  BY TCP  WHY TCP",
                "a-program-of-some-length  127.0.0.1:80  246 GiB/s   0 B/s  receives: too_few_op…",
            ),
            (
                100,
                Rows::Connections,
                "PROGRAM                       PID  REMOTE           BY SHM  BY TCP  WHY TCP",
                "a-program-of-some-length  4194304  127.0.0.1:80  246 GiB/s   0 B/s  receives: too_few_operations",
            ),
            (
                140,
                Rows::Connections,
                "PROGRAM                  PID  LOCAL                                           REMOTE        SENDS  RECEIVES     BY SHM  BY TCP  WHY TCP",
                "a-program-of-some-…  4194304  [2001:db8:1111:2222:3333:4444:5555:6666]:65535  127.0.0.1:80  shm    tcp       246 GiB/s   0 B/s  receives: t…",
            ),
        ] {
            let shown = screen_of(&mut busy(rows), width, 7);
            assert_eq!((shown[3].as_str(), shown[4].as_str()), (head, row), "{rows:?} at {width}");
        }
    }

    #[test]
    fn latencies_are_shown_on_demand_and_unknown_without_an_answer() {
        let histogram = Histogram::default();
        let at = |latency: Latency| {
            let mut now = snapshot(3);
            now.processes[0].connections[0].connected = true;
            now.processes[0].connections[0].latency = latency;
            now
        };
        let mut app = app("\t");
        assert!(!screen_of(&mut app, 160, 7).join("\n").contains("WITHIN"));
        press(&mut app, KeyCode::Char('l'));
        histogram.add(3_000);
        let before = at(histogram.copy());
        histogram.add(50_000_000);
        app.take(model::look(Some((&before, Duration::from_secs(1))), &at(histogram.copy())));
        let shown = screen_of(&mut app, 160, 7);
        assert!(shown[3].ends_with("HALF WITHIN  99 % WITHIN"), "{shown:?}");
        assert!(shown[4].ends_with("    65.5 ms      65.5 ms"), "{shown:?}");
        assert!(!shown[5].contains("ms") && !shown[5].contains("unknown"), "it was accepted: {shown:?}");
        app.take(model::look(Some((&before, Duration::from_secs(1))), &before));
        assert!(screen_of(&mut app, 160, 7)[4].ends_with("    unknown      unknown"));
        press(&mut app, KeyCode::Char('l'));
        assert!(!screen_of(&mut app, 160, 7).join("\n").contains("WITHIN"));
    }

    #[test]
    fn the_other_lines_are_never_cut_within_a_part() {
        let shown = |width| screen_of(&mut busy(Rows::Programs), width, 7);
        assert_eq!(shown(60)[1], "246 GiB/s by shared memory (100.0 %), 0 B/s by TCP");
        assert_eq!(shown(80)[1], "246 GiB/s by shared memory (100.0 %), 0 B/s by TCP, 1073741814 sleeps/s");
        assert_eq!(
            shown(100)[1],
            "246 GiB/s by shared memory (100.0 %), 0 B/s by TCP, 1073741814 sleeps/s, 1073741814 wake-ups/s"
        );
        assert_eq!(shown(60)[6], "q quit  Tab connections  Enter details  s by bytes/s  h help");
        assert_eq!(
            shown(80)[6],
            "q quit  Tab connections  Enter details  s by bytes/s  r down  / filter  h help"
        );
    }

    /// Numbers of every magnitude.
    fn any_number() -> impl Strategy<Value = u64> {
        (any::<u64>(), 0_u32..64).prop_map(|(number, bits)| number >> bits)
    }

    fn any_look() -> impl Strategy<Value = Look> {
        let speeds = || any_number().prop_map(|number| number as f64);
        let rates = || {
            (speeds(), speeds(), speeds(), speeds(), speeds())
                .prop_map(|(shm, tcp, sleeps, wake_ups, spin)| Rates { shm, tcp, sleeps, wake_ups, spin })
        };
        let counts = || any_number().prop_map(|number| number as usize >> 2);
        let program = ("[a-z]{1,20}", any::<u32>(), any::<u32>(), counts(), counts(), counts(), rates())
            .prop_map(|(program, pid, uid, on_shm, half, on_tcp, rates)| {
                let totals = Totals::default();
                Program { program, pid, uid, on_shm, half, on_tcp, rates, totals }
            });
        let connection = ("[a-z]{1,20}", any::<u32>(), any::<[u16; 8]>(), any::<u16>(), speeds(), speeds())
            .prop_map(|(program, pid, ip, port, shm, tcp)| {
                let row = end(port, TCP, 1);
                let local = (ip, port).into();
                let (remote, why) = (row.remote, "too_few_operations".to_owned());
                let (send, receive) = (Transport::Shm, Transport::Tcp);
                let latency = Latency::default();
                End { program, pid, local, remote, send, receive, why, shm, tcp, latency, uid: 0, row }
            });
        let (programs, connections) = (vec(program, 1..5), vec(connection, 1..5));
        (rates(), any_number(), programs, connections).prop_map(|(rates, uptime, programs, connections)| {
            Look { uptime_seconds: uptime, seconds: 1.0, rates, programs, connections, ..Look::default() }
        })
    }

    /// Returns what stands in a line between gaps of two spaces or more.
    fn parts(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|part| !part.is_empty()).collect()
    }

    /// Returns the text of each cell of a row.
    fn cells(app: &App, at: usize) -> Vec<String> {
        let rate = |bytes: f64| format!("{}/s", table::bytes(bytes as u64));
        match app.rows {
            Rows::Programs => {
                let row = app.programs()[at];
                let counts = [row.on_shm, row.half, row.on_tcp].map(|count| count.to_string());
                let rates = [row.rates.sleeps, row.rates.wake_ups].map(|rate| format!("{rate:.0}"));
                [row.program.clone(), row.pid.to_string(), row.uid.to_string()]
                    .into_iter()
                    .chain(counts)
                    .chain([rate(row.rates.shm), rate(row.rates.tcp)])
                    .chain(rates)
                    .chain([format!("{:.2}", row.rates.spin)])
                    .collect()
            }
            Rows::Connections => {
                let row = app.connections()[at];
                let end = [row.pid.to_string(), row.local.to_string(), row.remote.to_string()];
                [row.program.clone()]
                    .into_iter()
                    .chain(end)
                    .chain([
                        "shm".to_owned(),
                        "tcp".to_owned(),
                        rate(row.shm),
                        rate(row.tcp),
                        row.why.clone(),
                    ])
                    .collect()
            }
        }
    }

    proptest! {
        #[test]
        fn each_number_is_whole_on_the_screen_or_its_column_is_absent(
            look in any_look(),
            is_programs in any::<bool>(),
            width in 1_u16..220,
        ) {
            let rows = if is_programs { Rows::Programs } else { Rows::Connections };
            let columns: &[Column] = if is_programs { &PROGRAMS } else { &CONNECTIONS };
            let mut app = App::new(rows, Sort::Rate, String::new());
            app.take(look);
            let count = if is_programs { app.programs().len() } else { app.connections().len() };
            let shown = screen_of(&mut app, width, count as u16 + 5);
            let titles = parts(&shown[3]);
            let kept: Vec<usize> =
                (0..columns.len()).filter(|at| titles.contains(&columns[*at].title)).collect();
            prop_assert_eq!(kept.len(), titles.len(), "a title is not whole: {:?}", titles);
            for at in 0..count {
                let (row, expected) = (parts(&shown[4 + at]), cells(&app, at));
                prop_assert_eq!(row.len(), kept.len());
                for (cell, column) in row.into_iter().zip(&kept) {
                    let whole = expected[*column].as_str();
                    let is_short = columns[*column].least.is_some()
                        && cell.strip_suffix('…').is_some_and(|begin| whole.starts_with(begin));
                    prop_assert!(cell == whole || is_short, "{:?} instead of {:?}", cell, whole);
                }
            }
            let rates = &app.look.rates;
            let whole: Vec<String> = traffic(rates).into_iter().map(|(_, spans)| spans[0].content.to_string()).collect();
            for part in shown[1].split(", ").filter(|part| !part.is_empty()) {
                prop_assert!(whole.iter().any(|whole| whole == part), "{:?} is cut", part);
            }
        }
    }

    #[test]
    fn a_broker_that_is_gone_is_said_and_the_rest_stays() {
        let mut app = app("");
        app.trouble = Some("no broker at /run/x: gone\x1b[2J".into());
        let shown = screen(&mut app);
        assert_eq!(shown[2], "no broker at /run/x: gone\\u{1b}[2J");
        assert!(shown[4].starts_with("memca"));
    }

    #[test]
    fn the_first_look_has_no_rates_and_a_new_program_none_either() {
        let look = model::look(None, &snapshot(1));
        assert_eq!((look.seconds, look.rates.shm, look.programs[0].rates.shm), (0.0, 0.0, 0.0));
        let mut before = snapshot(1);
        before.processes.remove(0);
        let look = model::look(Some((&before, Duration::from_secs(1))), &snapshot(3));
        assert_eq!(look.programs[0].rates.shm, 0.0);
        assert_eq!(look.connections[0].shm, 0.0);
    }

    #[test]
    fn the_smallest_screen_is_survived() {
        for (width, height) in [(1, 1), (10, 2), (40, 4)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(&mut app("h"), frame)).unwrap();
            terminal.draw(|frame| draw(&mut app("\t"), frame)).unwrap();
        }
    }
}
