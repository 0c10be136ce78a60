//! Measures a container that stops and starts with its address on another host, as in table 4 of
//! the Slim paper but without a container runtime: the time of each step, and when a client on a
//! third host gets answers again.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::Group;
use super::lab::{Container, Lab, Map, Moving, Routers};
use crate::comparison::{Point, Quantity, rotated};
use crate::find;
use crate::interrupt::pause;
use crate::process::Process;
use crate::progress::Progress;
use crate::report::TextLine;
use crate::stats::Spread;
use crate::worker::{BEGIN, name};

/// The results by way, in the order of the columns.
#[derive(Debug, Serialize)]
pub(super) struct Migration {
    ways: Vec<OfWay>,
}

#[derive(Debug, Serialize)]
struct OfWay {
    way: &'static str,
    /// The reason why it was left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<String>,
    steps: Vec<Step>,
    /// Under shunt: in how many rounds the client's first connection after the move used the host
    /// network.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_on_host: Option<usize>,
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Step {
    label: &'static str,
    /// A figure for each round.
    milliseconds: Vec<f64>,
}

/// The ways in which the client's router finds the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The overlay, without shunt.
    Vxlan,
    /// The routers' files, which are read again.
    File,
    /// etcd.
    Etcd,
}

const WAYS: [Way; 3] = [Way::Vxlan, Way::File, Way::Etcd];
const STEPS: [&str; 5] =
    ["stopped", "address moved", "started", "first connection answered", "from stop to answer"];
/// The last step's label: up to the first connection on the host network.
const ON_HOST: &str = "from stop to the host network";
/// The approximate length of a turn: start of routers and programs, and the move.
pub(super) const TURN: Duration = Duration::from_secs(1);
/// How long a program may take to be ready, or a client to get an answer.
const LIMIT: Duration = Duration::from_secs(30);

impl Way {
    fn label(self) -> &'static str {
        match self {
            Way::Vxlan => "VXLAN",
            Way::File => "shunt",
            Way::Etcd => "shunt, etcd",
        }
    }

    fn missing(self) -> Option<String> {
        find::missing(&["etcd"]).filter(|_| self == Way::Etcd)
    }
}

/// Returns the number of turns.
pub(super) fn turns(repeats: u32) -> u32 {
    repeats * WAYS.len() as u32
}

/// Measures all ways in turn.
pub(super) fn measure(repeats: u32, progress: &Progress) -> Result<Migration> {
    let lab = Lab::build_for_moving().context("building a lab of three hosts")?;
    let _etcd = if Way::Etcd.missing().is_none() { Some(lab.start_etcd()?) } else { None };
    let mut ways: Vec<OfWay> = WAYS.iter().map(|way| OfWay::of(*way)).collect();
    for of_way in &ways {
        if let Some(missing) = &of_way.missing {
            progress.say(&format!("left out: migration, {}: {missing}", of_way.way));
        }
    }
    for (round, index) in rotated(repeats, WAYS.len()) {
        if ways[index].missing.is_none() {
            progress.set_message(format!("migration: {}", WAYS[index].label()));
            let what = || format!("migration: {}", WAYS[index].label());
            let moved = move_once(&lab, WAYS[index], round).with_context(what)?;
            ways[index].add(&moved);
        }
    }
    Ok(Migration { ways })
}

/// Milliseconds of each step. Under shunt also the time from the stop to the host network, and
/// whether the first connection used it.
struct Moved {
    steps: [f64; STEPS.len()],
    on_host: Option<(f64, bool)>,
}

fn move_once(lab: &Lab, way: Way, round: usize) -> Result<Moved> {
    let map = match way {
        Way::Vxlan => None,
        Way::File => Some(Map::File),
        // A new prefix hides the entries of earlier rounds.
        Way::Etcd => Some(Map::Etcd { prefix: format!("/round-{round}/") }),
    };
    let routers = map.as_ref().map(|map| lab.route_moving(map)).transpose()?;
    let container = lab.moving(Moving::Before)?;
    let server = serve(lab, &container, way)?;
    let address = server.1.clone();
    let mut client = lab.reaching(way != Way::Vxlan);
    let mut client = Process::spawn_with_lines(client.args(["reach", "--to", &address]), "the client")?;
    client.expect(BEGIN)?;
    let mut reach = || -> Result<()> {
        client.tell("again")?;
        client.line(LIMIT).map(drop)
    };
    let is_on_host = |reach: &mut dyn FnMut() -> Result<()>| -> Result<bool> {
        let Some(routers) = &routers else { return Ok(false) };
        let before = routers.paths()?.host;
        reach()?;
        Ok(routers.paths()?.host > before)
    };
    reach()?;
    let deadline = Instant::now() + LIMIT;
    while routers.is_some() && !is_on_host(&mut reach)? {
        ensure!(Instant::now() < deadline, "no connection takes the host network");
        pause(Duration::from_millis(5))?;
    }
    let before = routers.as_ref().map(Routers::paths).transpose()?;

    let begin = Instant::now();
    let mut moments = vec![begin];
    server.0.finish()?;
    moments.push(Instant::now());
    drop(container);
    let container = lab.moving(Moving::After)?;
    if let (Some(routers), Some(Map::File)) = (&routers, &map) {
        routers.have_moved()?;
    }
    moments.push(Instant::now());
    let server = serve(lab, &container, way)?;
    moments.push(Instant::now());
    reach()?;
    moments.push(Instant::now());

    let milliseconds = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
    let mut on_host = None;
    if let (Some(routers), Some(before)) = (&routers, before) {
        let is_first = routers.paths()?.host > before.host;
        let mut last = moments[moments.len() - 1];
        if !is_first {
            while !is_on_host(&mut reach)? {
                ensure!(begin.elapsed() < LIMIT, "no connection takes the host network again");
            }
            last = Instant::now();
        }
        on_host = Some((milliseconds(begin, last), is_first));
    }
    client.finish()?;
    server.0.finish()?;
    let all = milliseconds(begin, moments[4]);
    let step = |which: usize| milliseconds(moments[which], moments[which + 1]);
    Ok(Moved { steps: [step(0), step(1), step(2), step(3), all], on_host })
}

/// Starts the program of the moving container and returns its address.
fn serve(lab: &Lab, container: &Container<'_>, way: Way) -> Result<(Process, String)> {
    let mut command = lab.serving(container, way != Way::Vxlan);
    command.args(["echo", "--nodelay", "--size", "1", "--at", &format!("{}:7000", Lab::MOVING)]);
    Process::serving(&mut command, "the server")
}

impl OfWay {
    fn of(way: Way) -> OfWay {
        let mut labels = STEPS.to_vec();
        labels.extend((way != Way::Vxlan).then_some(ON_HOST));
        let steps = labels.into_iter().map(|label| Step { label, milliseconds: Vec::new() });
        OfWay {
            way: way.label(),
            missing: way.missing(),
            steps: steps.collect(),
            first_on_host: (way != Way::Vxlan).then_some(0),
        }
    }

    fn add(&mut self, moved: &Moved) {
        let figures = moved.steps.into_iter().chain(moved.on_host.map(|(time, _)| time));
        self.steps.iter_mut().zip(figures).for_each(|(step, figure)| step.milliseconds.push(figure));
        if let (Some(count), Some((_, true))) = (&mut self.first_on_host, moved.on_host) {
            *count += 1;
        }
    }
}

impl Migration {
    pub(super) fn points(&self) -> Vec<Point> {
        self.ways.iter().flat_map(OfWay::points).collect()
    }

    #[cfg(test)]
    pub(super) fn outline() -> Vec<Point> {
        WAYS.iter().flat_map(|way| OfWay::of(*way).points()).collect()
    }

    pub(super) fn write(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "\na container stops, and starts with its address on another host; a client on a third one, secure (ms)"
        );
        TextLine::new("", 32).cells(22, self.ways.iter().map(|of_way| of_way.way)).end(out);
        for label in STEPS.into_iter().chain([ON_HOST]) {
            let cell = |of_way: &OfWay| {
                let step = of_way.steps.iter().find(|step| step.label == label);
                let spread = step.and_then(|step| Spread::of(step.milliseconds.iter().copied()));
                spread.map(Spread::shown).unwrap_or_default()
            };
            TextLine::new(label, 32).cells(22, self.ways.iter().map(cell)).end(out);
        }
        for of_way in &self.ways {
            let rounds = of_way.steps[0].milliseconds.len();
            match (&of_way.missing, of_way.first_on_host) {
                (Some(missing), _) => {
                    let _ = writeln!(out, "  {}: left out: {missing}", of_way.way);
                }
                (None, Some(count)) => {
                    let way = of_way.way;
                    let _ = writeln!(
                        out,
                        "  {way}: the first connection was on the host network in {count} of {rounds}"
                    );
                }
                (None, None) => {}
            }
        }
    }
}

impl OfWay {
    fn points(&self) -> Vec<Point> {
        let of_step = |step: &Step| {
            let (table, rounds) = (name(Group::Migration), step.milliseconds.clone());
            Point::plain(&table, step.label, self.way, Quantity::STEP, rounds, self.missing.clone())
        };
        self.steps.iter().map(of_step).collect()
    }
}
