//! `shunt top`: shows repeatedly how many bytes programs move, by transport.

mod app;
mod details;
mod model;
mod view;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use shunt_abi::status::Snapshot;

use crate::args::TopArgs;
use crate::filter::Filter;
use crate::{daemon, status};
use app::{App, Wish};
pub(crate) use app::{Rows, Sort};

/// How long a signal may go unnoticed.
const NAP: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &TopArgs) -> Result<()> {
    let mut looks = Looks::begin(args)?;
    if args.json {
        return print(args, &mut looks);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("this is for a terminal; `shunt top --json` prints the same as JSON, a line for each look");
    }
    // The terminal is restored after a panic, too.
    let terminal = ratatui::try_init().context("the terminal cannot be prepared")?;
    let shown = show(args, &mut looks, terminal);
    ratatui::restore();
    shown
}

/// The broker's socket, and its last snapshot.
struct Looks {
    broker: PathBuf,
    only: Filter,
    last: Option<(Instant, Snapshot)>,
    /// Programs are to measure latencies.
    latency: bool,
}

impl Looks {
    fn begin(args: &TopArgs) -> Result<Looks> {
        let broker = status::find(args.broker.as_deref())?;
        Ok(Looks { broker, only: args.only.clone(), last: None, latency: args.latency })
    }

    fn next(&mut self) -> Result<model::Look> {
        let mut snapshot = match self.latency {
            true => shunt_broker::status_with_latency(&self.broker)?,
            false => shunt_broker::status(&self.broker)?,
        };
        self.only.apply(&mut snapshot);
        let now = Instant::now();
        // After a restart, the broker's counters start again from zero.
        let before = self.last.as_ref().filter(|(_, before)| before.broker_pid == snapshot.broker_pid);
        let look = model::look(before.map(|(at, before)| (before, now - *at)), &snapshot);
        self.last = Some((now, snapshot));
        Ok(look)
    }
}

fn print(args: &TopArgs, looks: &mut Looks) -> Result<()> {
    let every = Duration::from_secs_f64(args.interval);
    // The first snapshot has no predecessor to compare with.
    looks.next()?;
    let mut left = args.count;
    while left != Some(0) {
        std::thread::sleep(every);
        let line = serde_json::to_string(&looks.next()?).context("the look cannot be printed")?;
        writeln!(std::io::stdout(), "{line}")?;
        left = left.map(|left| left - 1);
    }
    Ok(())
}

fn show(args: &TopArgs, looks: &mut Looks, mut terminal: DefaultTerminal) -> Result<()> {
    let every = Duration::from_secs_f64(args.interval);
    let is_over = daemon::stop_flag()?;
    let mut app = App::new(args.rows, args.sort, args.filter.clone().unwrap_or_default());
    app.reversed = args.reverse;
    app.latency = args.latency;
    let (mut due, mut left) = (Instant::now(), args.count);
    loop {
        if Instant::now() >= due {
            match looks.next() {
                Ok(look) => app.take(look),
                Err(error) => app.trouble = Some(format!("{error:#}")),
            }
            due = Instant::now() + every;
            if let Some(left) = &mut left {
                *left = left.saturating_sub(1);
            }
        }
        terminal.draw(|frame| view::draw(&mut app, frame)).context("the terminal cannot be written to")?;
        if is_over.load(Relaxed) || left == Some(0) {
            return Ok(());
        }
        let rest = if app.paused { NAP } else { due.saturating_duration_since(Instant::now()).min(NAP) };
        if !event::poll(rest)? {
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        let wish = app.press(key);
        looks.latency = app.latency;
        match wish {
            Wish::Nothing => {}
            Wish::Look => due = Instant::now(),
            Wish::Quit => return Ok(()),
        }
        if app.paused && app.trouble.is_none() {
            due = Instant::now() + every;
        }
    }
}
