//! Draws the display.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};
use shunt_abi::reason::Transport;

use super::app::{App, Rows};
use super::model::{End, Program, Rates};
use crate::status::{left, printable, right};
use crate::table::{self, Column};

const HELP: &str = "\
Tab, p, c   programs, or ends of connections
s, r        sort by something else, or the other way round
/           show only rows with what you type; Enter keeps it, Esc drops it
arrows      scroll; PgUp, PgDn and Home too
space       stop, or go on
Enter       look now
h, ?        this
q           leave

Bytes are what an end of a connection sends and receives: between two programs under shunt both count them.
What spins is a thread that waits for what is about to come: 1.00 is one processor.
`shunt explain PROGRAM` says why a connection is on TCP, and what to do about it.";

pub(super) fn draw(app: &App, frame: &mut Frame<'_>) {
    let layout = [Constraint::Length(3), Constraint::Min(1), Constraint::Length(1)];
    let [head, body, foot] = Layout::vertical(layout).areas(frame.area());
    frame.render_widget(Paragraph::new(heading(app)), head);
    if app.helps {
        frame.render_widget(Paragraph::new(HELP), body);
    } else {
        let table = match app.rows {
            Rows::Programs => programs(app),
            Rows::Connections => connections(app),
        };
        frame.render_widget(table, body);
    }
    frame.render_widget(Paragraph::new(footer(app)), foot);
}

fn heading(app: &App) -> Text<'static> {
    let look = &app.look;
    let state = if app.paused { ", stopped" } else { "" };
    let links = if look.links == 1 { "link" } else { "links" };
    let uptime = table::duration(look.uptime_seconds);
    let first = format!("broker {}, up {uptime}: {} {links}{state}", look.broker_pid, look.links);
    let trouble = app.trouble.as_deref().map(printable).unwrap_or_default();
    Text::from(vec![
        Line::from(first.bold()),
        Line::from(match look.seconds > 0.0 {
            true => traffic(&look.rates),
            false => vec![Span::raw("rates follow with the next look")],
        }),
        Line::from(trouble.fg(Color::Red)),
    ])
}

fn traffic(rates: &Rates) -> Vec<Span<'static>> {
    let all = rates.shm + rates.tcp;
    let share = if all > 0.0 { format!(" ({:.1} %)", rates.shm / all * 100.0) } else { String::new() };
    vec![
        Span::styled(format!("{} by shared memory{share}", speed(rates.shm)), of(Transport::Shm)),
        Span::raw(", "),
        Span::styled(format!("{} by TCP", speed(rates.tcp)), of(Transport::Tcp)),
        Span::raw(format!(
            "; {:.0} sleeps/s, {:.0} wake-ups/s, {:.2} processors spin",
            rates.sleeps, rates.wake_ups, rates.spin
        )),
    ]
}

fn footer(app: &App) -> Line<'static> {
    if app.typing {
        return Line::from(format!("show only: {}_", printable(&app.filter)));
    }
    let other = if app.rows == Rows::Programs { "connections" } else { "programs" };
    let filter =
        if app.filter.is_empty() { "filter".to_owned() } else { format!("only: {}", printable(&app.filter)) };
    let order = format!("{}{}", app.sort.label(), if app.reversed { ", reversed" } else { "" });
    let keys = [
        ("q", "quit".to_owned()),
        ("Tab", other.to_owned()),
        ("s", format!("by {order}")),
        ("/", filter),
        ("space", if app.paused { "go on" } else { "stop" }.to_owned()),
        ("h", "help".to_owned()),
    ];
    let spans = keys
        .into_iter()
        .flat_map(|(key, what)| [Span::styled(key, Modifier::REVERSED), Span::raw(format!(" {what}  "))]);
    Line::from(spans.collect::<Vec<_>>())
}

fn programs(app: &App) -> Table<'static> {
    let columns = [
        left("PROGRAM"),
        right("PID"),
        right("USER"),
        right("SHM"),
        right("HALF"),
        right("TCP"),
        right("BY SHM"),
        right("BY TCP"),
        right("SLEEPS/S"),
        right("WAKE-UPS/S"),
        right("SPIN"),
    ];
    let some = |count: usize, transport| if count > 0 { of(transport) } else { Style::new() };
    let row = |program: &Program| {
        let Program { program, pid, uid, on_shm, half, on_tcp, rates } = program;
        vec![
            plain(printable(program)),
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
    lay_out(&columns, app.programs().into_iter().map(row).collect(), app.first)
}

fn connections(app: &App) -> Table<'static> {
    let columns = [
        left("PROGRAM"),
        right("PID"),
        left("LOCAL"),
        left("REMOTE"),
        left("SENDS"),
        left("RECEIVES"),
        right("BY SHM"),
        right("BY TCP"),
        left("WHY TCP"),
    ];
    let row = |end: &End| {
        let End { program, pid, local, remote, send, receive, why, shm, tcp } = end;
        vec![
            plain(printable(program)),
            plain(pid.to_string()),
            plain(local.to_string()),
            plain(remote.to_string()),
            (send.label().to_owned(), of(*send)),
            (receive.label().to_owned(), of(*receive)),
            plain(speed(*shm)),
            plain(speed(*tcp)),
            plain(why.clone()),
        ]
    };
    lay_out(&columns, app.connections().into_iter().map(row).collect(), app.first)
}

/// Computes the layout from all rows, including those outside the window. So columns do not move
/// when the user scrolls.
fn lay_out(columns: &[Column], rows: Vec<Vec<(String, Style)>>, first: usize) -> Table<'static> {
    let width = |at: usize| {
        let cells = rows.iter().map(|row| row[at].0.chars().count());
        cells.chain([columns[at].title.len()]).max().unwrap_or(0)
    };
    let widths: Vec<Constraint> = (0..columns.len()).map(|at| Constraint::Length(width(at) as u16)).collect();
    let cell = |column: &Column, text: String| {
        let text = Text::from(text);
        Cell::from(if column.right { text.right_aligned() } else { text })
    };
    let head =
        Row::new(columns.iter().map(|column| cell(column, column.title.to_owned())).collect::<Vec<_>>());
    let shown = rows.into_iter().skip(first).map(|row| {
        let cells = columns.iter().zip(row).map(|(column, (text, style))| cell(column, text).style(style));
        Row::new(cells.collect::<Vec<_>>())
    });
    let shown: Vec<Row<'static>> = shown.collect();
    Table::new(shown, widths).header(head.style(Modifier::BOLD)).column_spacing(2)
}

fn plain(text: String) -> (String, Style) {
    (text, Style::new())
}

fn speed(bytes: f64) -> String {
    format!("{}/s", table::bytes(bytes as u64))
}

/// Returns the style of a transport. Each transport has one colour everywhere; its name is always
/// shown as well.
fn of(transport: Transport) -> Style {
    Style::new().fg(match transport {
        Transport::Shm => Color::Green,
        Transport::Tcp => Color::Yellow,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
    use shunt_abi::reason::Reason;
    use shunt_abi::status::{Connection, Direction, Moved, Process, Share, Snapshot, Totals};

    use super::super::app::{Sort, Wish};
    use super::super::model;
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
        };
        Process { pid, uid: 1000, program: program.to_owned(), totals, connections: ends, left_out: 0 }
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

    fn screen(app: &App) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(130, 8)).unwrap();
        terminal.draw(|frame| draw(app, frame)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |row: &[ratatui::buffer::Cell]| {
            row.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
        };
        buffer.content.chunks(130).map(line).collect()
    }

    #[test]
    fn programs_are_shown_with_what_they_move_in_a_second() {
        let expected = [
            "broker 7, up 1 min 3 s: 1 link",
            "2.00 MiB/s by shared memory (99.9 %), 2.00 KiB/s by TCP; 10 sleeps/s, 10 wake-ups/s, 0.00 processors spin",
            "",
            "PROGRAM     PID  USER  SHM  HALF  TCP      BY SHM      BY TCP  SLEEPS/S  WAKE-UPS/S  SPIN",
            "memca\\u{7}   41  1000    1     0    1  2.00 MiB/s  2.00 KiB/s        10          10  0.00",
            "idle         42  1000    0     0    1       0 B/s       0 B/s         0           0  0.00",
            "",
            "q quit  Tab connections  s by bytes a second  / filter  space stop  h help",
        ];
        assert_eq!(screen(&app("")), expected);
    }

    #[test]
    fn connections_are_shown_with_their_transports_and_why() {
        let shown = screen(&app("\ts"));
        assert_eq!(
            shown[3..],
            [
                "PROGRAM     PID  LOCAL            REMOTE        SENDS  RECEIVES      BY SHM      BY TCP  WHY TCP",
                "memca\\u{7}   41  127.0.0.1:11211  127.0.0.1:80  shm    shm       2.00 MiB/s       0 B/s",
                "memca\\u{7}   41  127.0.0.1:11212  127.0.0.1:80  tcp    tcp            0 B/s  2.00 KiB/s  fork",
                "idle         42  127.0.0.1:7      127.0.0.1:80  tcp    tcp            0 B/s       0 B/s  fork",
                "q quit  Tab programs  s by bytes by shared memory  / filter  space stop  h help",
            ]
        );
    }

    #[test]
    fn rows_are_sorted_and_filtered_by_keys() {
        let names =
            |keys: &str| app(keys).programs().iter().map(|row| row.program.clone()).collect::<Vec<_>>();
        assert_eq!(names(""), ["memca\x07", "idle"]);
        assert_eq!(names("r"), ["idle", "memca\x07"]);
        assert_eq!(names("sss"), ["idle", "memca\x07"], "by name");
        assert_eq!(names("/mem\n"), ["memca\x07"]);
        assert_eq!(names("/q"), Vec::<String>::new(), "what is typed is no key");
        assert!(screen(&app("/mem"))[7].starts_with("show only: mem_"));
        assert_eq!(app("\t/:7\n").connections().len(), 1);
        let mut app = app("");
        assert_eq!(app.press(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE)), Wish::Quit);
        assert_eq!(app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Wish::Quit);
    }

    #[test]
    fn nothing_is_scrolled_out_of_sight() {
        let mut app = app("");
        for _ in 0..50 {
            app.press(KeyEvent::new(KeyCode::PageDown, KeyModifiers::NONE));
        }
        assert!(screen(&app)[4].starts_with("idle"), "the last row stays");
        app.press(KeyEvent::new(KeyCode::Tab, KeyModifiers::NONE));
        assert!(screen(&app)[4].starts_with("memca"));
    }

    #[test]
    fn a_broker_that_is_gone_is_said_and_the_rest_stays() {
        let mut app = app("");
        app.trouble = Some("no broker at /run/x: gone\x1b[2J".into());
        let shown = screen(&app);
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
            terminal.draw(|frame| draw(&app("h"), frame)).unwrap();
            terminal.draw(|frame| draw(&app("\t"), frame)).unwrap();
        }
    }
}
