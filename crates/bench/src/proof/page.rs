//! The report as a page for other people. The output of the user's programs appears only as text.

use anyhow::Result;

use super::figures::{Figure, Memory, Report, Verdict, bytes, percent};
use super::text::{control, endings, spreads, title};
use crate::report::{Bar, Bars, Column, Group, OURS, Page, SHUNT, number};

/// Returns the page.
pub(super) fn page(report: &Report) -> Result<String> {
    let mut page = Page::new("shunt report");
    page.paragraph("", SHUNT);
    if let Some(warning) = report.surroundings.warning() {
        page.alarm(warning);
    }
    page.paragraph(&format!("lead {}", class(report.verdict)), &report.sentence());
    page.paragraph(
        "faint",
        &format!(
            "The same two programs, in turn without shunt and under it: medians of {} rounds, in brackets the least and the most. \
             Measured on {}.",
            report.rounds,
            report.surroundings.line()
        ),
    );
    for finding in &report.findings {
        page.alarm(finding);
    }
    page.cards(&cards(report));
    for note in &report.notes {
        page.paragraph("", note);
    }
    page.heading("What ran");
    page.table(
        &[("", Column::Words), ("command", Column::Words)],
        &[row(["server", &report.program]), row(["load", &report.load])],
    );
    figures(&mut page, report)?;
    transports(&mut page, report);
    endings_of_both(&mut page, report);
    page.heading("The machine");
    page.table(&[("", Column::Words), ("", Column::Words)], &report.surroundings.rows());
    page.heading("Repeat it");
    page.paragraph("", "With shunt installed, in the same directory:");
    page.preformatted(&report.command);
    page.paragraph("faint", &how(report));
    Ok(page.finish())
}

fn how(report: &Report) -> String {
    format!(
        "Each turn starts the server anew, waits until it listens, runs the load, and ends both. The sides take turns, and \
         which begins changes from round to round; ratios are of turns of the same round. Each round has a second native turn, the \
         control: a difference counts only if it is larger than that between native turns. Under shunt, server and load are started \
         by `shunt run`, with a broker of their own, whose processor time and memory count as well. Processor time is that of all \
         processes of the server or the load, from the load's start to its end. Memory is what processes have to themselves and \
         their parts of what they share, in a turn of each side that is not among the rounds. It took {:.0} s.",
        report.seconds_in_all
    )
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Gains => "good",
        Verdict::Loses | Verdict::Fails => "bad",
        Verdict::NoClearDifference | Verdict::TooFewRounds => "",
    }
}

fn cards(report: &Report) -> Vec<(&'static str, String, String)> {
    let times = |ratio: f64| format!("{ratio:.2}x");
    let to_native = |what: &str| format!("{what}, shunt to native");
    let mut cards: Vec<_> = report
        .figures
        .iter()
        .filter(|figure| figure.is_whole)
        .map(|figure| {
            (class(figure.verdict()), times(figure.shunt_to_native.median), to_native(&figure.label))
        })
        .collect();
    if let Some(memory) = report.memory {
        let [_, _, ratio] = memory.shown();
        cards.push(("", ratio, to_native(Memory::LABEL)));
    }
    cards.push(("", percent(report.on_shm), "of the bytes through shared memory".to_owned()));
    cards
}

fn figures(page: &mut Page, report: &Report) -> Result<()> {
    if report.figures.is_empty() {
        return Ok(());
    }
    page.heading("Figures");
    let mut rows: Vec<Vec<String>> = report
        .figures
        .iter()
        .map(|figure| {
            let [native, shunt] = spreads(figure);
            vec![title(figure), native, shunt, figure.shunt_to_native.as_ratio(), control(figure)]
        })
        .collect();
    if let Some(memory) = report.memory {
        let [native, shunt, ratio] = memory.shown();
        rows.push(vec![Memory::LABEL.to_owned(), native, shunt, ratio, "-".to_owned()]);
    }
    let numbers =
        ["native", "shunt", "shunt to native", "native to native"].map(|title| (title, Column::Numbers));
    page.table(&[&[("", Column::Words)], &numbers[..]].concat(), &rows);
    if let Some(memory) = report.memory {
        page.paragraph("", &memory.sentence());
    }
    let plots: Vec<String> = report.figures.iter().map(|figure| bars(figure).svg()).collect::<Result<_>>()?;
    page.figures(&plots);
    rounds(page, report);
    Ok(())
}

fn bars(figure: &Figure) -> Bars {
    let (factor, unit) = figure.scale();
    let bar = |label, color, side: usize| {
        let spread = if side == 0 { figure.native } else { figure.shunt };
        Bar {
            label,
            color,
            figure: spread.times(factor),
            rounds: figure.rounds.iter().map(|round| round[side] * factor).collect(),
        }
    };
    let better = if figure.lower_is_better { "lower is better" } else { "higher is better" };
    let group = Group { label: String::new(), bars: vec![bar("native", 0, 0), bar("shunt", OURS, 1)] };
    let unit = if unit.is_empty() { better.to_owned() } else { format!("{unit}, {better}") };
    Bars { title: figure.label.clone(), unit, groups: vec![group] }
}

/// Appends the figures of each round, so that readers can check the medians.
fn rounds(page: &mut Page, report: &Report) {
    page.paragraph("faint", "Round by round:");
    let rounds = report.figures.iter().map(|figure| figure.rounds.len()).max().unwrap_or(0);
    let numbers: Vec<String> = (1..=rounds).map(|round| round.to_string()).collect();
    let mut head = vec![("", Column::Words), ("", Column::Words)];
    head.extend(numbers.iter().map(|number| (number.as_str(), Column::Numbers)));
    let sides = report.figures.iter().flat_map(|figure| [(figure, 0, "native"), (figure, 1, "shunt")]);
    let rows: Vec<Vec<String>> = sides
        .map(|(figure, side, name)| {
            let (factor, _) = figure.scale();
            let cells = figure.rounds.iter().map(|round| number(round[side] * factor));
            [title(figure), name.to_owned()].into_iter().chain(cells).collect()
        })
        .collect();
    page.table(&head, &rows);
}

fn transports(page: &mut Page, report: &Report) {
    page.heading("Which transport the bytes took");
    let ends = report.coverage.ends;
    page.paragraph(
        "",
        &format!(
            "Under shunt {} of {} went through shared memory, by {} of {} ends of connections.",
            percent(report.on_shm),
            bytes(report.coverage.bytes_in_all()),
            ends.on_shm,
            ends.seen
        ),
    );
    let by_tcp = report.by_tcp.iter().map(|one| (percent(one.part), &one.cause));
    let kept = report.kept.iter().map(|kept| (kept.program.clone(), &kept.cause));
    let rows: Vec<Vec<String>> = by_tcp
        .chain(kept)
        .map(|(of, cause)| vec![of, cause.label.clone(), cause.explanation.clone(), cause.advice.clone()])
        .collect();
    if !rows.is_empty() {
        let words = ["by TCP", "reason", "", "what to do about it"].map(|title| (title, Column::Words));
        page.table(&words, &rows);
    }
    if !report.said.is_empty() {
        page.preformatted(&report.said.join("\n"));
    }
}

fn endings_of_both(page: &mut Page, report: &Report) {
    page.heading("How it ended");
    let sides = [("native", &report.native), ("shunt", &report.shunt)];
    let rows: Vec<Vec<String>> = sides.iter().map(|(name, side)| row([name, &endings(side)])).collect();
    page.table(&[("", Column::Words), ("", Column::Words)], &rows);
    for (name, side) in sides {
        if !side.output.is_empty() {
            page.paragraph("faint", &format!("The end of what the load printed last, {name}:"));
            page.preformatted(&side.output);
        }
    }
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).into()
}
