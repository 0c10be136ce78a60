//! Draws packets as arrows between hosts, with time running down: a panel for each way, all on one
//! scale.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use serde::Serialize;

use super::bars;

/// The packets of one way.
#[derive(Clone, Debug)]
pub(crate) struct TimeLine {
    pub(crate) label: &'static str,
    /// The hosts, from left to right.
    pub(crate) hosts: [&'static str; 4],
    pub(crate) arrows: Vec<Arrow>,
    /// The arrival of the last byte, in ms.
    pub(crate) end: f64,
}

/// A packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrow {
    /// The indices of the hosts.
    pub(crate) ends: [usize; 2],
    /// The times of sending and arrival in ms, which are equal if it was lost.
    pub(crate) times: [f64; 2],
    pub(crate) flow: Flow,
}

/// The purpose of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Flow {
    Handshake,
    Request,
    Answer,
    Acknowledgement,
    /// A packet of another connection.
    Other,
}

const PANEL: i32 = 270;
const MARGIN: i32 = 36;
const TOP: i32 = 84;
const HEIGHT: i32 = 520;
const BOTTOM: i32 = 28;
/// The interval between the horizontal lines, in ms.
const STEP: i32 = 100;

/// The kinds of packets in the order of drawing, with their legends.
const FLOWS: [(Flow, RGBColor, u32, &str); 5] = [
    (Flow::Other, RGBColor(200, 190, 210), 1, "other connections"),
    (Flow::Acknowledgement, RGBColor(170, 175, 180), 1, "acknowledgement"),
    (Flow::Handshake, RGBColor(208, 120, 30), 2, "SYN, SYN-ACK"),
    (Flow::Request, RGBColor(60, 150, 90), 2, "with bytes, to the server"),
    (Flow::Answer, RGBColor(28, 116, 226), 2, "with bytes, to the client"),
];

/// Returns all panels in a row, as SVG.
pub(crate) fn time_lines(title: &str, panels: &[&TimeLine]) -> Result<String> {
    let mut out = String::new();
    draw(&mut out, title, panels).map_err(|error| anyhow!("drawing {title}: {error}"))?;
    Ok(out)
}

fn draw(out: &mut String, title: &str, panels: &[&TimeLine]) -> Result<()> {
    let width = MARGIN + PANEL * panels.len().max(3) as i32;
    let root =
        SVGBackend::with_string(out, (width as u32, (TOP + HEIGHT + BOTTOM) as u32)).into_drawing_area();
    // Some packets are still in flight when the last byte arrives.
    let ends = |panel: &&TimeLine| {
        let there = panel.arrows.iter().map(|arrow| arrow.times[1]);
        there.fold(panel.end, f64::max)
    };
    let end = panels.iter().map(ends).fold(1.0, f64::max);
    let y = |ms: f64| TOP + (f64::from(HEIGHT) * ms / end).round() as i32;
    let write = |text: &str, at, size, side| bars::write(&root, text, at, size, side);
    write(&format!("{title}, in ms"), (0, 12), 16, HPos::Left)?;
    for (index, (_, color, thick, words)) in FLOWS.into_iter().rev().enumerate() {
        let x = MARGIN + index as i32 * 160;
        root.draw(&PathElement::new([(x, 34), (x + 18, 34)], color.stroke_width(thick)))?;
        write(words, (x + 22, 34), 12, HPos::Left)?;
    }
    for ms in (0..=end as i32).step_by(STEP as usize) {
        let at = y(f64::from(ms));
        write(&ms.to_string(), (MARGIN - 6, at), 12, HPos::Right)?;
        root.draw(&PathElement::new([(MARGIN, at), (width, at)], RGBColor(190, 190, 190).mix(0.35)))?;
    }
    for (index, panel) in panels.iter().enumerate() {
        let left = MARGIN + PANEL * index as i32 + 24;
        let x = |host: usize| left + host as i32 * (PANEL - 56) / (panel.hosts.len() as i32 - 1);
        write(panel.label, (left - 14, 56), 14, HPos::Left)?;
        for (host, name) in panel.hosts.iter().enumerate() {
            write(name, (x(host), TOP - 10), 12, HPos::Center)?;
            root.draw(&PathElement::new([(x(host), TOP), (x(host), y(end))], BLACK.mix(0.7)))?;
        }
        for (flow, color, thick, _) in FLOWS {
            for arrow in panel.arrows.iter().filter(|arrow| arrow.flow == flow) {
                let [from, to] = [0, 1].map(|end| (x(arrow.ends[end]), y(arrow.times[end])));
                if arrow.times[0] == arrow.times[1] {
                    root.draw(&Cross::new(from, 4, color.stroke_width(thick)))?;
                    continue;
                }
                root.draw(&PathElement::new([from, to], color.stroke_width(thick)))?;
                if thick > 1 {
                    root.draw(&Circle::new(to, 2, color.filled()))?;
                }
            }
        }
        let last = (x(0), y(panel.end));
        root.draw(&Circle::new(last, 4, RED.stroke_width(2)))?;
        write(&format!("{:.0}", panel.end), (last.0 - 2, last.1 + 12), 12, HPos::Left)?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_on_the_scale_of_the_longest_and_what_was_lost_is_a_cross() {
        let panel = |end: f64, there: f64| TimeLine {
            label: "a <way>",
            hosts: ["a", "b", "c", "d"],
            arrows: vec![Arrow { ends: [0, 3], times: [0.0, there], flow: Flow::Answer }],
            end,
        };
        let svg = time_lines("both", &[&panel(1_000.0, 500.0), &panel(500.0, 0.0)]).unwrap();
        assert!(svg.contains("a &lt;way&gt;"), "{svg}");
        let [middle, bottom] = [TOP + HEIGHT / 2, TOP + HEIGHT];
        // The end of the arrow, and the end of both panels.
        for y in [middle, bottom] {
            assert!(svg.contains(&format!("cy=\"{y}\"")), "{y} in {svg}");
        }
        let blue = "stroke=\"#1C74E2\" stroke-width=\"2\"";
        let lines = svg.lines().filter(|line| line.contains(blue)).count();
        assert_eq!(lines, 1 + 1 + 2, "the legend, an arrow, and both lines of a cross: {svg}");
    }
}
