//! Shows the state of a running service: its counters, histograms and tables.

use std::path::Path;

use anyhow::Result;
use serde_json::Value;
use shunt_serve::engine::{self, Request};

use crate::table::{Column, left, render, right};

/// The columns of the status.
pub(super) const COLUMNS: [Column; 6] = [
    left("STATE", 0),
    left("KIND", 0),
    right("ENTRIES", 0),
    right("CAPACITY", 0),
    right("EVICTED", 0),
    right("REFUSED", 0),
];

/// Returns the rows of the status. A counter has its value in the column of the entries, a histogram
/// the number of values.
pub(super) fn rows(status: &Value) -> Vec<Vec<String>> {
    let parts = status["state"].as_array().into_iter().flatten();
    let row = |part: &Value| {
        let count = ["entries", "value", "count"].into_iter().find_map(|name| part[name].as_u64());
        let number = |name: &str| part[name].as_u64().map_or_else(String::new, |number| number.to_string());
        let mut row = vec![text(&part["name"]), text(&part["kind"]), count.unwrap_or(0).to_string()];
        row.extend(["capacity", "evicted", "refused"].map(number));
        row
    };
    parts.map(row).collect()
}

/// Prints a part of the state.
pub(super) fn dump(control: &Path, name: &str, json: bool) -> Result<()> {
    let dump = engine::ask(control, Request::Dump(name.to_owned()))?;
    print!("{}", if json { format!("{dump:#}\n") } else { report(&dump) });
    Ok(())
}

fn report(dump: &Value) -> String {
    if let Some(rows) = dump["buckets"].as_array() {
        let below = |row: &Value| row["below"].as_u64().map_or("any".to_owned(), |limit| limit.to_string());
        let rows: Vec<Vec<String>> = rows.iter().map(|row| vec![below(row), text(&row["count"])]).collect();
        let table = render(&[right("BELOW", 0), right("COUNT", 0)], &rows);
        return format!("{table}sum {}\n", dump["sum"]);
    }
    let Some(entries) = dump["entries"].as_array() else { return format!("{}\n", dump["value"]) };
    let row = |entry: &Value| {
        let key = if entry["key"].is_null() { &entry["index"] } else { &entry["key"] };
        vec![text(key), value(&entry["value"])]
    };
    render(&[left("KEY", 0), left("VALUE", 0)], &entries.iter().map(row).collect::<Vec<_>>())
}

/// Returns the members of a struct with their names, and other values as they are.
fn value(value: &Value) -> String {
    let Some(members) = value.as_object() else { return text(value) };
    let member = |(name, value): (&String, &Value)| format!("{name} {}", text(value));
    members.iter().map(member).collect::<Vec<_>>().join(", ")
}

/// Returns a string without its quotation marks, and other values as JSON.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
