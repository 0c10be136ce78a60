//! Prints what a policy decides about a connection, and by which rules.

use std::fmt::Write;

use serde_json::Value;

/// Returns the verdict and its reasons as text.
pub(super) fn report(decided: &Value) -> String {
    let mut text = format!("{}\n", verdict(decided["verdict"].as_str().unwrap_or_default()));
    for end in ["client", "server"] {
        let _ = writeln!(text, "  {end}: {}", container(&decided[end]));
    }
    for by in decided["decided-by"].as_array().into_iter().flatten() {
        let what = match by["rule"].as_str() {
            Some(rule) => format!("the rule {rule:?}"),
            None => "the default".to_owned(),
        };
        let direction = by["direction"].as_str().map(|it| format!(" for {it}")).unwrap_or_default();
        let _ = writeln!(text, "  decided{direction} by {what}");
    }
    for rule in decided["possible-rules"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "  possibly decided by the rule {rule}");
    }
    match decided["possible-rules-left-out"].as_u64() {
        None | Some(0) => {}
        Some(more) => drop(writeln!(text, "  and {more} more")),
    }
    text
}

fn verdict(label: &str) -> &str {
    match label {
        "unknown-labels" => "unclear, so it stays on the overlay: the labels of a container are not known",
        "depends-on-the-clients-port" => "it depends on the client's port",
        other => other,
    }
}

fn container(end: &Value) -> String {
    let name = end["name"].as_str().unwrap_or_default();
    match (end["is"].as_str(), end["namespace"].as_str()) {
        (Some("known"), Some(namespace)) => format!("{namespace}/{name}, {}", labels(&end["labels"])),
        (Some("known"), None) => format!("{name}, {}", labels(&end["labels"])),
        (Some("unknown"), _) => "a container that no source names, or more than one".to_owned(),
        _ => "no container: an address of the host, or outside of the overlay".to_owned(),
    }
}

fn labels(labels: &Value) -> String {
    let pair = |(key, value): (&String, &Value)| format!("{key}={}", value.as_str().unwrap_or_default());
    let all: Vec<String> = labels.as_object().into_iter().flatten().map(pair).collect();
    if all.is_empty() { "without labels".to_owned() } else { all.join(",") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_verdict_is_printed_with_what_decides() {
        let decided = json!({
            "verdict": "deny",
            "client": { "is": "known", "name": "web-1", "namespace": "shop", "labels": { "app": "web", "tier": "a" } },
            "server": { "is": "outside" },
            "decided-by": [{ "direction": "egress", "rule": "shop/web egress 1" }, { "direction": "ingress", "rule": null }],
            "possible-rules": [],
            "possible-rules-left-out": 0,
        });
        let lines = report(&decided);
        let lines: Vec<&str> = lines.lines().collect();
        assert_eq!(
            lines,
            [
                "deny",
                "  client: shop/web-1, app=web,tier=a",
                "  server: no container: an address of the host, or outside of the overlay",
                "  decided for egress by the rule \"shop/web egress 1\"",
                "  decided for ingress by the default",
            ]
        );
        let unclear = json!({
            "verdict": "unknown-labels",
            "client": { "is": "known", "name": "web-1", "namespace": null, "labels": {} },
            "server": { "is": "unknown" },
            "decided-by": [],
            "possible-rules": ["a", "b"],
            "possible-rules-left-out": 7,
        });
        let text = report(&unclear);
        assert!(text.starts_with("unclear, so it stays on the overlay"), "{text}");
        assert!(
            text.contains("web-1, without labels") && text.ends_with("the rule \"b\"\n  and 7 more\n"),
            "{text}"
        );
    }
}
