//! Tests of `shunt report --papers`: a page with the figures of the papers and those of this
//! machine. The tests do not check the results.

mod common;
#[path = "common/page.rs"]
mod page;

use std::process::Command;

use common::*;
use page::{nothing_is_left, page, writes};
use serde_json::Value;

/// Returns the command `shunt report --papers`. It works in a directory that it must leave empty.
fn papers(shell: &Shell, arguments: &[&str]) -> Command {
    writes(shell, shell.shunt(["report", "--papers", "--rounds", "1", "--json"]), arguments)
}

#[test]
fn a_figure_is_measured_and_stands_beside_the_papers() {
    let shell = Shell::new();
    let ended = Ended::of(papers(&shell, &["--only", "inferno.*(second table|addendum)"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("1 comparisons of 1 rounds, about "), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let exhibits = report["exhibits"].as_array().unwrap();
    assert_eq!(exhibits.len(), 2, "{report}");
    let claims = || exhibits.iter().flat_map(|exhibit| exhibit["claims"].as_array().unwrap());
    let of_messages = claims().filter(|claim| !claim["what"].as_str().unwrap().contains("medians"));
    for claim in of_messages {
        assert_eq!(claim["missing"], Value::Null, "{claim}");
        assert_eq!(claim["lines"].as_array().unwrap().len(), 1, "{claim}");
        assert!(claim["lines"][0]["ours"]["median"].is_f64(), "{claim}");
        assert_eq!(claim["command"], "shunt bench ipc --sizes 112192 --repeats 1");
    }
    let fcntl = claims().find(|claim| claim["what"] == "queue with fcntl locks").unwrap();
    assert_eq!((fcntl["theirs"].as_str(), fcntl["place"].as_str()), (Some("about 0.5x"), Some("Addendum")));

    let page = page(&shell);
    assert!(
        !page.contains("src=") && !page.contains("url(") && !page.contains("href="),
        "nothing from elsewhere"
    );
    assert!(page.contains("<svg"));
    for words in ["Inferno, Addendum", "about 0.5x (Addendum)", "shunt bench ipc --sizes 112192", "Repeat it"]
    {
        assert!(page.contains(words), "no {words:?}");
    }
    nothing_is_left(&shell);
}

/// The table contains a claim about how long a container takes to move.
#[test]
fn a_container_that_moves_is_a_claim() {
    needs_root();
    let shell = Shell::new();
    let ended = Ended::of(papers(&shell, &["--only", "slim, table 4"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let exhibits = report["exhibits"].as_array().unwrap().iter();
    let claims = exhibits.flat_map(|exhibit| exhibit["claims"].as_array().unwrap());
    let moves: Vec<_> = claims.collect();
    assert_eq!(moves.len(), 3, "{report}");
    for claim in moves {
        assert_eq!(claim["missing"], Value::Null, "{claim}");
        assert!(claim["lines"][0]["ours"]["median"].is_f64(), "{claim}");
    }
}

#[test]
fn time_lines_are_drawn_from_a_run() {
    needs_root();
    let shell = Shell::new();
    let ended = Ended::of(papers(&shell, &["--only", "ktcp, figure 2"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let claims = report["exhibits"][0]["claims"].as_array().unwrap();
    assert_eq!(claims.len(), 3, "{report}");
    assert!(claims.iter().all(|claim| claim["lines"][0]["ours"]["median"].is_f64()), "{report}");
    let page = page(&shell);
    for words in ["KTCP, Figure 2: who sends what when", "shunt relay, plain", "+ turbo start", "R_C"] {
        assert!(page.contains(words), "no {words:?}");
    }
    nothing_is_left(&shell);
}

#[test]
fn what_has_no_figures_says_why_and_measures_nothing() {
    let shell = Shell::new();
    let ended = Ended::of(papers(&shell, &["--only", r"slim, (figure 4|table 1)"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let reasons: Vec<&Value> =
        report["exhibits"].as_array().unwrap().iter().map(|exhibit| &exhibit["not_measured"]).collect();
    assert_eq!(reasons, ["there are no figures in it", "a drawing"]);
    assert!(page(&shell).contains("not measured: a drawing"));
    nothing_is_left(&shell);
}

#[test]
fn a_figure_that_no_paper_has_is_refused() {
    let shell = Shell::new();
    let ended = Ended::of(papers(&shell, &["--only", "figure 99"]));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("the papers are Slipstream, Slim, Inferno, Slick, KTCP"),
        "{}",
        ended.stderr
    );
    assert!(!shell.path("page.html").exists());
}
