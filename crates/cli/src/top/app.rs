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
    /// All bytes a second, the most first
    Rate,
    /// Bytes a second through shared memory, the most first
    Shm,
    /// Bytes a second by TCP, the most first
    Tcp,
    /// The number of connections, the most first; of connections: as rate
    Connections,
    /// The program's name
    Program,
    /// The process id
    Pid,
    /// The peer's address; of programs: as program
    Remote,
    /// The reason for TCP, those without one last; of programs: as program
    Reason,
}

impl Sort {
    pub(super) const ALL: [Sort; 8] = [
        Sort::Rate,
        Sort::Shm,
        Sort::Tcp,
        Sort::Connections,
        Sort::Program,
        Sort::Pid,
        Sort::Remote,
        Sort::Reason,
    ];

    /// Returns the sort that is `steps` further.
    fn step(self, steps: usize) -> Sort {
        let at = Sort::ALL.iter().position(|one| *one == self).unwrap_or(0);
        Sort::ALL[(at + steps) % Sort::ALL.len()]
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Sort::Rate => "bytes/s",
            Sort::Shm => "shared memory",
            Sort::Tcp => "TCP",
            Sort::Connections => "connections",
            Sort::Program => "program",
            Sort::Pid => "pid",
            Sort::Remote => "remote",
            Sort::Reason => "reason",
        }
    }

    /// Returns the titles of the columns that this sorts by.
    pub(super) fn titles(self) -> &'static [&'static str] {
        match self {
            Sort::Rate => &["BY SHM", "BY TCP"],
            Sort::Shm => &["BY SHM"],
            Sort::Tcp => &["BY TCP"],
            Sort::Connections => &["SHM", "MIXED", "TCP"],
            Sort::Program => &["PROGRAM"],
            Sort::Pid => &["PID"],
            Sort::Remote => &["REMOTE"],
            Sort::Reason => &["WHY TCP"],
        }
    }

    /// Returns whether the greatest values come first.
    fn falls(self) -> bool {
        matches!(self, Sort::Rate | Sort::Shm | Sort::Tcp | Sort::Connections)
    }

    fn of_programs(self, one: &Program, other: &Program) -> Ordering {
        match self {
            Sort::Rate => {
                let all = |row: &Program| row.rates.shm + row.rates.tcp;
                all(other).total_cmp(&all(one))
            }
            Sort::Shm => other.rates.shm.total_cmp(&one.rates.shm),
            Sort::Tcp => other.rates.tcp.total_cmp(&one.rates.tcp),
            Sort::Connections => other.ends().cmp(&one.ends()),
            Sort::Program | Sort::Remote | Sort::Reason => one.program.cmp(&other.program),
            Sort::Pid => one.pid.cmp(&other.pid),
        }
    }

    fn of_ends(self, one: &End, other: &End) -> Ordering {
        match self {
            Sort::Rate | Sort::Connections => other.rate().total_cmp(&one.rate()),
            Sort::Shm => other.shm.total_cmp(&one.shm),
            Sort::Tcp => other.tcp.total_cmp(&one.tcp),
            Sort::Program => one.program.cmp(&other.program),
            Sort::Pid => one.pid.cmp(&other.pid),
            Sort::Remote => one.remote.cmp(&other.remote),
            Sort::Reason => (one.why.is_empty(), &one.why).cmp(&(other.why.is_empty(), &other.why)),
        }
    }
}

/// The action that a key requests, beyond a change of the display's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    /// Query the broker now.
    Look,
    Quit,
}

/// Names a row from one snapshot to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Id {
    Program { pid: u32 },
    End { pid: u32, cookie: u64, fd: i32 },
}

impl Id {
    fn of_program(program: &Program) -> Id {
        Id::Program { pid: program.pid }
    }

    fn of_end(end: &End) -> Id {
        Id::End { pid: end.pid, cookie: end.row.cookie, fd: end.row.fd }
    }
}

/// The row whose details are shown.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Program(Program),
    End(End),
}

/// The details of one row, as it was when it was last seen.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    pub(super) item: Item,
    /// Whether the last snapshot has the row no more.
    pub(super) is_gone: bool,
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
    /// Whether connections have columns of latencies, which their programs measure meanwhile.
    pub(super) latency: bool,
    /// The row whose details are shown instead of the table.
    pub(super) opened: Option<Opened>,
    /// The index of the selected row.
    pub(super) at: usize,
    /// The selected row, which stays selected when rows are sorted anew.
    selected: Option<Id>,
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
            latency: false,
            opened: None,
            at: 0,
            selected: None,
            first: 0,
        }
    }

    /// Takes the next snapshot.
    pub(super) fn take(&mut self, look: Look) {
        (self.look, self.trouble) = (look, None);
        if let Some(mut opened) = self.opened.take() {
            let now = self.find(&opened.item);
            opened.is_gone = now.is_none();
            opened.item = now.unwrap_or(opened.item);
            self.opened = Some(opened);
        }
        self.settle();
    }

    fn find(&self, item: &Item) -> Option<Item> {
        match item {
            Item::Program(old) => {
                let is_it = |one: &&Program| Id::of_program(one) == Id::of_program(old);
                self.look.programs.iter().find(is_it).cloned().map(Item::Program)
            }
            Item::End(old) => {
                let is_it = |one: &&End| Id::of_end(one) == Id::of_end(old);
                self.look.connections.iter().find(is_it).cloned().map(Item::End)
            }
        }
    }

    /// Returns the other end of a connection, if its program is under shunt.
    pub(super) fn peer(&self, end: &End) -> Option<&End> {
        let mut ends = self.look.connections.iter();
        ends.find(|one| (one.local, one.remote) == (end.remote, end.local))
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
            KeyCode::Esc if self.opened.is_some() => self.opened = None,
            KeyCode::Esc => self.refilter(String::new()),
            KeyCode::Char('h' | '?') => self.helps = !self.helps,
            KeyCode::Char('l') => {
                self.latency = !self.latency;
                return Wish::Look;
            }
            KeyCode::Tab if self.rows == Rows::Programs => self.show(Rows::Connections),
            KeyCode::Tab | KeyCode::Char('p') => self.show(Rows::Programs),
            KeyCode::Char('c') => self.show(Rows::Connections),
            KeyCode::Char('s') => self.sort = self.sort.step(1),
            KeyCode::Char('S') => self.sort = self.sort.step(Sort::ALL.len() - 1),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('/') => {
                self.opened = None;
                self.typing = true;
            }
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Char('u') => return Wish::Look,
            KeyCode::Enter if self.opened.is_some() => self.opened = None,
            KeyCode::Enter => self.open(),
            KeyCode::Down => self.select(self.at.saturating_add(1)),
            KeyCode::Up => self.select(self.at.saturating_sub(1)),
            KeyCode::PageDown => self.select(self.at.saturating_add(10)),
            KeyCode::PageUp => self.select(self.at.saturating_sub(10)),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            _ => {}
        }
        self.settle();
        Wish::Nothing
    }

    fn edit(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(letter) => self.refilter(format!("{}{letter}", self.filter)),
            KeyCode::Backspace => {
                let mut filter = self.filter.clone();
                filter.pop();
                self.refilter(filter);
            }
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.refilter(String::new());
            }
            _ => {}
        }
    }

    fn refilter(&mut self, filter: String) {
        self.filter = filter;
        self.settle();
    }

    fn show(&mut self, rows: Rows) {
        if self.rows != rows {
            (self.rows, self.at, self.first, self.selected) = (rows, 0, 0, None);
        }
        self.opened = None;
    }

    fn open(&mut self) {
        let item = match self.rows {
            Rows::Programs => self.programs().get(self.at).copied().cloned().map(Item::Program),
            Rows::Connections => self.connections().get(self.at).copied().cloned().map(Item::End),
        };
        self.opened = item.map(|item| Opened { item, is_gone: false });
    }

    /// Selects the row at `at`, or the last one.
    fn select(&mut self, at: usize) {
        if self.opened.is_none() {
            let ids = self.ids();
            self.at = at.min(ids.len().saturating_sub(1));
            self.selected = ids.get(self.at).copied();
        }
    }

    /// Finds the selected row again. If there is none, the row at its place is selected, but the
    /// first row stays selected by its place: it is where the display begins.
    fn settle(&mut self) {
        let ids = self.ids();
        let at = self.selected.and_then(|selected| ids.iter().position(|id| *id == selected));
        self.at = at.unwrap_or(self.at).min(ids.len().saturating_sub(1));
        if self.selected.is_some() && at.is_none() {
            self.selected = ids.get(self.at).copied();
        }
    }

    fn ids(&self) -> Vec<Id> {
        match self.rows {
            Rows::Programs => self.programs().into_iter().map(Id::of_program).collect(),
            Rows::Connections => self.connections().into_iter().map(Id::of_end).collect(),
        }
    }

    /// Returns the programs that the filter lets through, in order.
    pub(super) fn programs(&self) -> Vec<&Program> {
        let texts = |row: &Program| vec![row.program.clone(), row.pid.to_string()];
        self.arranged(&self.look.programs, texts, Sort::of_programs, |row| row.pid)
    }

    /// Returns the connections that the filter lets through, in order.
    pub(super) fn connections(&self) -> Vec<&End> {
        let texts = |row: &End| {
            let addresses = [row.local, row.remote].map(|address| address.to_string());
            let texts = [row.program.clone(), row.pid.to_string(), row.why.clone()];
            addresses.into_iter().chain(texts).collect()
        };
        self.arranged(&self.look.connections, texts, Sort::of_ends, |row| row.pid)
    }

    /// Returns the rows that the filter lets through, in order. Rows that compare equal are ordered
    /// by process id, and keep their order from one snapshot to the next.
    fn arranged<'a, T>(
        &self,
        rows: &'a [T],
        texts: impl Fn(&T) -> Vec<String>,
        order: impl Fn(Sort, &T, &T) -> Ordering,
        pid: impl Fn(&T) -> u32,
    ) -> Vec<&'a T> {
        let wanted = self.filter.to_lowercase();
        let is_wanted = |row: &&T| texts(row).iter().any(|text| text.to_lowercase().contains(&wanted));
        let mut arranged: Vec<&T> = rows.iter().filter(is_wanted).collect();
        arranged.sort_by(|one, other| {
            let by_key = order(self.sort, one, other);
            let by_key = if self.reversed { by_key.reverse() } else { by_key };
            by_key.then(pid(one).cmp(&pid(other)))
        });
        arranged
    }

    /// Returns whether the sorted values grow from the first row to the last.
    pub(super) fn rises(&self) -> bool {
        self.sort.falls() == self.reversed
    }
}
