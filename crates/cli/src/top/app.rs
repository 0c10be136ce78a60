//! The state of the display, and how keys change it.

use std::cmp::Ordering;

use clap::ValueEnum;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::model::{End, Look, Program};

/// What a row is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rows {
    /// One program
    Programs,
    /// One end of a connection
    Connections,
}

/// By what rows are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// All bytes, the most first
    Rate,
    /// Bytes through shared memory, the most first
    Shm,
    /// Bytes by TCP, the most first
    Tcp,
    /// The program's name
    Program,
    /// The process id
    Pid,
}

impl Sort {
    pub(super) const ALL: [Sort; 5] = [Sort::Rate, Sort::Shm, Sort::Tcp, Sort::Program, Sort::Pid];

    fn next(self) -> Sort {
        let at = Sort::ALL.iter().position(|one| *one == self).unwrap_or(0);
        Sort::ALL[(at + 1) % Sort::ALL.len()]
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Sort::Rate => "bytes a second",
            Sort::Shm => "bytes by shared memory",
            Sort::Tcp => "bytes by TCP",
            Sort::Program => "program",
            Sort::Pid => "pid",
        }
    }

    fn order(self, one: Keys<'_>, other: Keys<'_>) -> Ordering {
        let by_rate = |of: fn(Keys<'_>) -> f64| of(other).total_cmp(&of(one));
        let order = match self {
            Sort::Rate => by_rate(|keys| keys.shm + keys.tcp),
            Sort::Shm => by_rate(|keys| keys.shm),
            Sort::Tcp => by_rate(|keys| keys.tcp),
            Sort::Program => one.program.cmp(other.program),
            Sort::Pid => Ordering::Equal,
        };
        // Rows that compare equal keep their order from one snapshot to the next.
        order.then(one.pid.cmp(&other.pid)).then(one.place.cmp(&other.place))
    }
}

/// The values that rows are sorted by.
#[derive(Clone, Copy)]
struct Keys<'a> {
    program: &'a str,
    pid: u32,
    shm: f64,
    tcp: f64,
    place: usize,
}

/// The action that a key requests, beyond a change of the display's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    /// Query the broker now.
    Look,
    Quit,
}

/// The state of the display.
#[derive(Debug)]
pub(super) struct App {
    pub(super) look: Look,
    /// The error of the last query, if it failed.
    pub(super) trouble: Option<String>,
    pub(super) rows: Rows,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// Whether keys are typed into the filter.
    pub(super) typing: bool,
    pub(super) paused: bool,
    pub(super) helps: bool,
    /// The index of the first visible row.
    pub(super) first: usize,
}

impl App {
    pub(super) fn new(rows: Rows, sort: Sort, filter: String) -> App {
        App {
            look: Look::default(),
            trouble: None,
            rows,
            sort,
            reversed: false,
            filter,
            typing: false,
            paused: false,
            helps: false,
            first: 0,
        }
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Wish {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Wish::Quit } else { Wish::Nothing };
        }
        if self.typing {
            self.edit(key.code);
            return Wish::Nothing;
        }
        match key.code {
            KeyCode::Char('q') => return Wish::Quit,
            KeyCode::Esc if self.helps => self.helps = false,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('h' | '?') => self.helps = !self.helps,
            KeyCode::Tab => {
                self.rows = if self.rows == Rows::Programs { Rows::Connections } else { Rows::Programs };
                self.first = 0;
            }
            KeyCode::Char('p') => self.rows = Rows::Programs,
            KeyCode::Char('c') => self.rows = Rows::Connections,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Enter => return Wish::Look,
            KeyCode::Down => self.first = self.first.saturating_add(1),
            KeyCode::Up => self.first = self.first.saturating_sub(1),
            KeyCode::PageDown => self.first = self.first.saturating_add(10),
            KeyCode::PageUp => self.first = self.first.saturating_sub(10),
            KeyCode::Home => self.first = 0,
            _ => {}
        }
        self.first = self.first.min(self.count().saturating_sub(1));
        Wish::Nothing
    }

    fn edit(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(letter) => self.filter.push(letter),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            _ => {}
        }
        self.first = 0;
    }

    fn count(&self) -> usize {
        match self.rows {
            Rows::Programs => self.programs().len(),
            Rows::Connections => self.connections().len(),
        }
    }

    /// Returns the programs that the filter lets through, in order.
    pub(super) fn programs(&self) -> Vec<&Program> {
        self.arranged(
            &self.look.programs,
            |row| vec![row.program.clone(), row.pid.to_string()],
            |row, place| Keys {
                program: &row.program,
                pid: row.pid,
                shm: row.rates.shm,
                tcp: row.rates.tcp,
                place,
            },
        )
    }

    /// Returns the connections that the filter lets through, in order.
    pub(super) fn connections(&self) -> Vec<&End> {
        self.arranged(
            &self.look.connections,
            |row| {
                vec![
                    row.program.clone(),
                    row.pid.to_string(),
                    row.local.to_string(),
                    row.remote.to_string(),
                    row.why.clone(),
                ]
            },
            |row, place| Keys { program: &row.program, pid: row.pid, shm: row.shm, tcp: row.tcp, place },
        )
    }

    fn arranged<'a, T>(
        &self,
        rows: &'a [T],
        texts: impl Fn(&T) -> Vec<String>,
        keys: impl Fn(&'a T, usize) -> Keys<'a>,
    ) -> Vec<&'a T> {
        let is_wanted = |row: &&T| texts(row).iter().any(|text| text.contains(&self.filter));
        let mut arranged: Vec<(usize, &T)> = rows.iter().filter(is_wanted).enumerate().collect();
        arranged.sort_by(|(place, one), (other_place, other)| {
            let order = self.sort.order(keys(one, *place), keys(other, *other_place));
            if self.reversed { order.reverse() } else { order }
        });
        arranged.into_iter().map(|(_, row)| row).collect()
    }
}
