//! Checks Grafana's dashboard, and the alert rules, against the metrics that exist.

use std::collections::BTreeSet;

use serde_json::Value;

const DASHBOARD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/grafana/shunt.json");

pub(crate) const ALERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/prometheus/shunt.yml");

pub(crate) fn read() -> Value {
    serde_json::from_str(&std::fs::read_to_string(DASHBOARD).unwrap()).unwrap()
}

/// Returns the expressions of all panels.
pub(crate) fn expressions(dashboard: &Value) -> Vec<&str> {
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|target| target["expr"].as_str().unwrap()).collect()
}

/// Fails if a panel or an alert uses a metric with `prefix` that is not on `page`, or if none does.
pub(crate) fn expect_all_on(page: &str, prefix: &str) {
    let dashboard = read();
    let alerts = std::fs::read_to_string(ALERTS).unwrap();
    let of_alerts = alerts.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let asked: BTreeSet<&str> = expressions(&dashboard)
        .into_iter()
        .chain(of_alerts)
        .flat_map(|expression| {
            expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        })
        .filter(|word| word.starts_with(prefix))
        .collect();
    assert!(!asked.is_empty(), "the dashboard has nothing of {prefix}");
    for name in asked {
        let (family, kind) = match (name.strip_suffix("_total"), name.strip_suffix("_bucket")) {
            (Some(family), _) => (family, "counter"),
            (_, Some(family)) => (family, "histogram"),
            _ => (name, "gauge"),
        };
        let line = format!("# TYPE {family} {kind}");
        assert!(page.lines().any(|one| one == line), "no {line:?} in:\n{page}");
    }
}
