//! Tables about bulk data: streams by size next to a probe, which copies through one ring.

use std::time::Duration;

use anyhow::Result;

use super::Group;
use super::point::{Load, Point, Sample};
use super::synthetic::{Pattern, Synthetic};
use super::tables::{Table, Unit, bytes};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::{Copying, Measured, name};

const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 1 << 20];
const FEW_SIZES: [usize; 2] = [16 << 10, 1 << 20];
/// The ring of a lane.
const RING: usize = 256 << 10;
const RINGS: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// The piece of the probe of rings.
const PIECE: usize = 16 << 10;

pub(super) fn tables() -> [Table; 4] {
    [
        streams(Placement::TwoCores, &SIZES, Side::BULK_PROBED),
        streams(Placement::Free, &FEW_SIZES, Side::BULK),
        streams(Placement::OneCore, &FEW_SIZES, Side::BULK),
        rings(),
    ]
}

fn streams(placement: Placement, sizes: &[usize], sides: &[Side]) -> Table {
    let load = |size| {
        let stream = Synthetic::new(Pattern::Stream, size, placement);
        Bulk { stream: Some(stream), piece: size, ring: RING, placement }
    };
    Table {
        group: Group::Bulk,
        title: format!("Bulk data in one direction, {}", placement.label()),
        unit: Unit::Megabytes,
        axis: Some("bytes"),
        points: sizes
            .iter()
            .map(|&size| Point::new(bytes(size), sides, load(size)).at(size).of_bytes(size))
            .collect(),
    }
}

fn rings() -> Table {
    let placement = Placement::TwoCores;
    let load = |ring| Bulk { stream: None, piece: PIECE, ring, placement };
    Table {
        group: Group::Bulk,
        title: format!("Two threads copy pieces of {} through a ring, by its size", bytes(PIECE)),
        unit: Unit::Megabytes,
        axis: Some("bytes of the ring"),
        points: RINGS
            .map(|ring| Point::new(bytes(ring), Side::PROBES, load(ring)).at(ring).of_bytes(PIECE))
            .into(),
    }
}

/// A stream, or the probe on its sides.
struct Bulk {
    stream: Option<Synthetic>,
    piece: usize,
    ring: usize,
    placement: Placement,
}

impl Load for Bulk {
    fn missing(&self) -> Option<String> {
        self.placement.missing()
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        match (side, &self.stream) {
            (Side::ProbePlain, _) => self.probe(stage, Copying::Plain, seconds),
            (Side::ProbeStreaming, _) => self.probe(stage, Copying::Streaming, seconds),
            (_, Some(stream)) => stream.run(stage, side, seconds),
            (_, None) => anyhow::bail!("only the probe has a ring of another size"),
        }
    }
}

impl Bulk {
    fn probe(&self, stage: &Stage, copying: Copying, seconds: Duration) -> Result<Sample> {
        // Not pinned as a whole: its two threads pin themselves.
        let mut command = stage.worker(Side::Tcp, Role::Client, Placement::Free)?;
        let (writer, reader) = stage.cpus();
        command.args(["probe", "--copying", &name(copying), "--on", &format!("{writer},{reader}")]);
        command.args(["--ring", &self.ring.to_string(), "--piece", &self.piece.to_string()]);
        command.args(["--seconds", &seconds.as_secs_f64().to_string()]);
        let mut process = Process::begun(&mut command, "the probe")?;
        let before = process.cpu();
        let measured: Measured = process.results(seconds)?;
        let cpu = process.cpu().saturating_sub(before);
        process.finish()?;
        Ok(Sample::of(&measured, Duration::ZERO, cpu))
    }
}
