//! `shunt overlay policy`: checks a policy file, prints the policy in effect, and sets another one.

mod decide;

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use shunt_overlay::{Imported, Policy, Request};

use crate::args::OverlayPolicy;
use crate::table::{Column, left, render, right};

pub(super) fn run(part: &OverlayPolicy) -> Result<()> {
    match part {
        OverlayPolicy::Check { file } => {
            Policy::read(file)?;
        }
        OverlayPolicy::Apply { file, control } => {
            let applied = shunt_overlay::ask(control, &Request::Apply(Policy::read(file)?))?;
            print!("{}", done(&applied));
        }
        OverlayPolicy::Import { files, namespace, json } => {
            let read =
                |file: &PathBuf| std::fs::read_to_string(file).with_context(|| file.display().to_string());
            let texts =
                files.iter().map(|file| Ok((file.as_path(), read(file)?))).collect::<Result<Vec<_>>>()?;
            let Imported { text, notes } = shunt_overlay::import(&texts, namespace)?;
            if *json {
                println!("{:#}", json!({ "policy": text, "notes": notes }));
            } else {
                print!("{text}");
                notes.iter().for_each(|note| eprintln!("shunt: {note}"));
            }
        }
        OverlayPolicy::Decide { client: (client, port), server, control, json } => {
            let request = Request::Decide { client: *client, port: *port, server: *server };
            let decided = shunt_overlay::ask(control, &request)?;
            print!("{}", if *json { format!("{decided:#}\n") } else { decide::report(&decided) });
        }
        OverlayPolicy::Show { control, json } => {
            let shown = shunt_overlay::ask(control, &Request::Policy)?;
            print!("{}", if *json { format!("{shown:#}\n") } else { report(&shown) });
        }
    }
    Ok(())
}

fn done(applied: &Value) -> String {
    let milliseconds = applied["seconds"].as_f64().unwrap_or(0.0) * 1_000.0;
    let mut text = format!("{} connections have been ended, in {milliseconds:.1} ms\n", applied["ended"]);
    if applied["left"] != 0 {
        text +=
            &format!("{} end when their programs come out of the call that they are in\n", applied["left"]);
    }
    let count = |what: &str| applied[what].as_u64().unwrap_or(0);
    if count("changed") + count("unchanged") != 0 {
        text += &format!("{} go on with another rate or class", count("changed"));
        text += &match count("unchanged") {
            0 => "\n".to_owned(),
            unchanged => format!(", {unchanged} with the one that they had: the router's log says why\n"),
        };
    }
    let off = list(&applied["off-shared-memory"]);
    if !off.is_empty() {
        text +=
            &format!("not on shared memory, so containers of this host stay on TCP with each other: {off}\n");
    }
    if let Some(error) = applied["limits"]["error"].as_str() {
        text += &format!(
            "container-rate is not in effect, so connections that need it stay on the overlay: {error}\n"
        );
    }
    let udp = &applied["udp"];
    if udp["namespaces"] != 0 {
        text += &format!("rules for UDP are in effect in {} network namespaces\n", udp["namespaces"]);
    }
    for (error, count) in udp["failed"].as_object().into_iter().flatten() {
        text += &format!("rules for UDP are not in effect in {count} network namespaces: {error}\n");
    }
    text
}

/// Returns the policy as text.
fn report(shown: &Value) -> String {
    let policy = &shown["policy"];
    let rules = policy["rules"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut rows: Vec<Vec<String>> = rules
        .iter()
        .zip(shown["connections"]["rules"].as_array().into_iter().flatten())
        .map(|(rule, count)| row(rule, count))
        .collect();
    let rest = [word(&Value::Null), word(&policy["default"])].into_iter();
    let empty = std::iter::repeat_n(String::new(), 8);
    rows.push(rest.chain(empty).chain([shown["connections"]["default"].to_string()]).collect());
    format!("router {}, {} rules\n\n{}", word(&shown["name"]), rules.len(), render(&RULES, &rows))
}

fn row(rule: &Value, count: &Value) -> Vec<String> {
    let shape = &rule["shape"];
    let rates = [("rate", ""), ("container-rate", " a container")]
        .into_iter()
        .filter_map(|(key, of)| Some(format!("{}bit/s{of}", shape[key].as_u64()? * 8)));
    let rate = rates.collect::<Vec<_>>().join(", ");
    vec![
        word(&rule["name"]),
        word(&rule["action"]) + if rule["protocol"] == "udp" { " udp" } else { "" },
        word(&rule["direction"]),
        list(&rule["from"]),
        list(&rule["source-ports"]),
        list(&rule["to"]),
        list(&rule["ports"]),
        rate,
        word(&shape["dscp"]),
        shape["priority"].as_u64().map(priority).unwrap_or_default(),
        count.to_string(),
    ]
}

/// Formats a priority as in the file: a number, or a class of tc.
fn priority(priority: u64) -> String {
    match priority >> 16 {
        0 => priority.to_string(),
        major => format!("{major:x}:{:x}", priority & 0xffff),
    }
}

fn list(values: &Value) -> String {
    let words: Vec<String> = values.as_array().into_iter().flatten().map(word).collect();
    words.join(",")
}

fn word(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Object(ends) if !ends.contains_key("start") => ends_of(ends),
        // A range of ports.
        Value::Object(range) if range.get("start") == range.get("end") => word(&range["start"]),
        Value::Object(range) => format!("{}-{}", range["start"], range["end"]),
        other => other.to_string(),
    }
}

/// Formats a selector, or a prefix with exceptions.
fn ends_of(ends: &Map<String, Value>) -> String {
    let parts = ends.iter().map(|(key, value)| match value {
        Value::Array(_) => format!("{key} {}", list(value)),
        value => format!("{key} {}", word(value)),
    });
    format!("[{}]", parts.collect::<Vec<_>>().join("; "))
}

const RULES: [Column; 11] = [
    left("RULE", 0),
    left("ACTION", 0),
    left("DIRECTION", 0),
    left("FROM", 0),
    left("SOURCE PORTS", 0),
    left("TO", 0),
    left("PORTS", 0),
    right("RATE", 0),
    right("DSCP", 0),
    right("PRIORITY", 0),
    right("CONNECTIONS", 0),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_shown_as_they_are_written() {
        let shown = json!({
            "name": "one",
            "policy": { "default": "allow", "rules": [
                { "name": "ssh", "action": "deny", "from": ["10.50.1.0/24"], "to": null,
                  "ports": [{ "start": 22, "end": 22 }, { "start": 2200, "end": 2299 }],
                  "shape": { "rate": null, "dscp": null, "priority": null } },
                { "name": "sql", "action": "allow", "direction": "ingress",
                  "from": [{ "labels": "app in (a,b)", "namespace": "shop" }, { "prefix": "10.0.0.0/8", "except": ["10.1.0.0/16"] }],
                  "source-ports": [{ "start": 1, "end": 1023 }], "to": null, "ports": ["sql"],
                  "shape": { "rate": null, "dscp": null, "priority": null } },
                { "name": "backup", "action": "allow", "from": null, "to": ["10.50.2.7/32"], "ports": null,
                  "shape": { "rate": 1_000_000, "dscp": 8, "priority": 0x1_0020 } },
            ] },
            "connections": { "rules": [0, 1, 3], "default": 12 },
        });
        let lines: Vec<Vec<String>> =
            report(&shown).lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect();
        assert_eq!(lines[3], ["ssh", "deny", "10.50.1.0/24", "22,2200-2299", "0"]);
        let ends = "[labels app in (a,b); namespace shop],[except 10.1.0.0/16; prefix 10.0.0.0/8]";
        assert!(
            lines[4].join(" ").contains(ends)
                && lines[4].ends_with(&["1-1023".into(), "sql".into(), "1".into()]),
            "{:?}",
            lines[4]
        );
        assert_eq!(lines[5], ["backup", "allow", "10.50.2.7/32", "8000000bit/s", "8", "1:20", "3"]);
        assert_eq!(lines[6], ["allow", "12"]);
    }
}
