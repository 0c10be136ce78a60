//! Reads and checks policy.toml. Errors name the line, and what to write instead.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use ipnet::IpNet;
use serde::Deserialize;
use shunt_config::Fault;
use toml::Spanned;

use super::shape::{parse_dscp, parse_priority, parse_rate};
use super::{Action, Default, Policy, Ports, Rule, Shape};

impl Policy {
    /// Reads a policy file.
    pub fn read(path: &Path) -> Result<Policy, Fault> {
        Policy::parse(path, &shunt_config::read_text(path)?)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<Policy, Fault> {
        let written: Written = shunt_config::parse(path, text)?;
        Policy::of(written).map_err(|Wrong { at, what }| Fault::at(path, text, at, what))
    }

    fn of(Written { default, labels, rule }: Written) -> Result<Policy, Wrong> {
        let labels = labels.iter().map(|(name, prefixes)| Ok((name.as_str(), label(name, prefixes)?)));
        let labels: Labels<'_> = labels.collect::<Result<_, Wrong>>()?;
        let mut names = BTreeSet::new();
        let mut rules = Vec::new();
        for rule in &rule {
            let name = &rule.name;
            if !names.insert(name.get_ref()) {
                return wrong(
                    name.span(),
                    format!("two rules have the name {:?}: give this another", name.get_ref()),
                );
            }
            rules.push(rule.check(&labels)?);
        }
        Ok(Policy { default, rules })
    }
}

/// An error, and the byte offset at which it begins.
#[derive(Debug)]
pub(super) struct Wrong {
    at: usize,
    what: String,
}

fn wrong<T>(span: Range<usize>, what: String) -> Result<T, Wrong> {
    Err(Wrong { at: span.start, what })
}

type Labels<'a> = BTreeMap<&'a str, Vec<IpNet>>;

/// The file's content before it is checked.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Written {
    #[serde(default = "allow")]
    default: Default,
    /// Names for groups of containers.
    #[serde(default)]
    labels: BTreeMap<String, Spanned<Vec<Spanned<String>>>>,
    #[serde(default)]
    rule: Vec<WrittenRule>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct WrittenRule {
    name: Spanned<String>,
    action: Action,
    from: Option<Spanned<Vec<Spanned<String>>>>,
    to: Option<Spanned<Vec<Spanned<String>>>>,
    ports: Option<Spanned<Vec<Spanned<NumberOrText>>>>,
    rate: Option<Spanned<String>>,
    dscp: Option<Spanned<NumberOrText>>,
    priority: Option<Spanned<NumberOrText>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a number or a string")]
enum NumberOrText {
    Number(i64),
    Text(String),
}

fn allow() -> Default {
    Default::Allow
}

impl WrittenRule {
    fn check(&self, labels: &Labels<'_>) -> Result<Rule, Wrong> {
        let prefixes = |written: &Option<Spanned<Vec<Spanned<String>>>>, key: &str| match written {
            None => Ok(None),
            Some(written) => containers(key, written, labels).map(Some),
        };
        Ok(Rule {
            name: self.name.get_ref().clone(),
            action: self.action,
            from: prefixes(&self.from, "from")?,
            to: prefixes(&self.to, "to")?,
            ports: self.ports.as_ref().map(ports).transpose()?,
            shape: self.shape()?,
        })
    }

    fn shape(&self) -> Result<Shape, Wrong> {
        let spans = [
            self.rate.as_ref().map(Spanned::span),
            self.dscp.as_ref().map(Spanned::span),
            self.priority.as_ref().map(Spanned::span),
        ];
        if self.action != Action::Allow
            && let Some(span) = spans.into_iter().flatten().next()
        {
            let what = "rate, dscp and priority are for connections that are allowed: say action = \"allow\", or leave it out";
            return wrong(span, what.into());
        }
        let located = |span: Range<usize>| move |what| Wrong { at: span.start, what };
        let rate = self.rate.as_ref().map(|it| parse_rate(it.get_ref()).map_err(located(it.span())));
        let dscp = self.dscp.as_ref().map(|it| parse_dscp(&it.get_ref().text()).map_err(located(it.span())));
        let priority =
            self.priority.as_ref().map(|it| parse_priority(&it.get_ref().text()).map_err(located(it.span())));
        Ok(Shape { rate: rate.transpose()?, dscp: dscp.transpose()?, priority: priority.transpose()? })
    }
}

impl NumberOrText {
    fn text(&self) -> String {
        match self {
            NumberOrText::Number(number) => number.to_string(),
            NumberOrText::Text(text) => text.clone(),
        }
    }
}

/// Returns the containers of a label. A label cannot refer to other labels.
fn label(name: &str, written: &Spanned<Vec<Spanned<String>>>) -> Result<Vec<IpNet>, Wrong> {
    if prefix(name).is_some() {
        return wrong(
            written.span(),
            format!("the label {name:?} looks like an address: give it another name"),
        );
    }
    containers(name, written, &Labels::new())
}

/// Returns the prefixes of a list of prefixes, single addresses and labels.
fn containers(
    key: &str,
    written: &Spanned<Vec<Spanned<String>>>,
    labels: &Labels<'_>,
) -> Result<Vec<IpNet>, Wrong> {
    let mut found = Vec::new();
    for word in written.get_ref() {
        let text = word.get_ref().as_str();
        match (prefix(text), labels.get(text)) {
            (Some(net), _) => found.push(net),
            (None, Some(of_label)) => found.extend(of_label),
            (None, None) => {
                let what = "is neither a prefix, as 10.50.1.0/24, nor an address, nor one of [labels]";
                return wrong(word.span(), format!("{text:?} {what}"));
            }
        }
    }
    if found.is_empty() {
        return wrong(
            written.span(),
            format!("{key} is empty and matches nothing: name a container, or leave it out"),
        );
    }
    Ok(found)
}

fn prefix(text: &str) -> Option<IpNet> {
    text.parse::<IpNet>().or_else(|_| text.parse().map(|address: std::net::IpAddr| address.into())).ok()
}

/// Parses a list of port numbers and of ranges such as "6000-6010".
fn ports(written: &Spanned<Vec<Spanned<NumberOrText>>>) -> Result<Vec<Ports>, Wrong> {
    if written.get_ref().is_empty() {
        return wrong(written.span(), "ports is empty and matches nothing: name one, or leave it out".into());
    }
    let parse = |word: &Spanned<NumberOrText>| {
        let text = word.get_ref().text();
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(Ports(first..=last)),
            _ => wrong(word.span(), format!("{text} is no port: say 80, or a range, as \"6000-6010\"")),
        }
    };
    written.get_ref().iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "default = 'deny'\n\n[labels]\nweb = ['10.50.1.0/24']\n\n[[rule]]\nname = 'a'\naction = 'allow'\n\
        from = ['web']\nto = ['10.50.2.7']\nports = [80, '6000-6010']\nrate = '10mbit'\ndscp = 'cs1'\npriority = 3\n\
        [[rule]]\nname = 'b'\naction = 'deny'\n";

    #[test]
    fn the_example_for_users_is_a_policy() {
        let page = include_str!("../../../../../docs/overlay.md");
        let (_, rest) = page.split_once("    # /etc/shunt/policy.toml\n").unwrap();
        let is_of_it = |line: &&str| line.is_empty() || line.starts_with("    ");
        let example = rest.lines().take_while(is_of_it).collect::<Vec<_>>().join("\n");
        assert_eq!(Policy::parse(Path::new("f"), &example).unwrap().rules(), 2, "{example}");
    }

    #[test]
    fn what_is_wrong_is_said_with_its_file_and_line_and_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.toml");
        Policy::read(&path).expect_err("there is no file");
        std::fs::write(&path, GOOD).unwrap();
        Policy::read(&path).unwrap();
        for (from, to, line, complaint) in [
            ("'deny'\n\n", "'reject'\n\n", 1, "there is no value reject"),
            ("10.50.1.0/24", "10.50.1", 4, "is neither a prefix"),
            ("['10.50.1.0/24']", "[]", 4, "web is empty"),
            ("web = ", "'10.1.1.1' = ", 4, "looks like an address"),
            ("'allow'", "'permit'", 8, "there is no value permit"),
            ("['web']", "['db']", 9, "is neither a prefix"),
            ("['10.50.2.7']", "[]", 10, "to is empty"),
            ("80,", "0,", 11, "is no port"),
            ("80,", "80000,", 11, "is no port"),
            ("6000-6010", "6010-6000", 11, "is no port"),
            ("[80, '6000-6010']", "[]", 11, "ports is empty"),
            ("10mbit", "10", 12, "say bits per second"),
            ("cs1", "cs9", 13, "say a code point"),
            ("= 3", "= 99", 14, "or a class of tc"),
            ("name = 'b'", "name = 'a'", 16, "two rules have the name"),
            ("'deny'\n", "'deny'\nport = [1]\n", 18, "there is no key port; did you mean ports?"),
            ("action = 'deny'\n", "action = 'deny'\ndscp = 1\n", 18, "are for connections that are allowed"),
        ] {
            // Replace the last occurrence: text that occurs twice belongs to a rule further below.
            let at = GOOD.rfind(from).unwrap();
            let text = [&GOOD[..at], to, &GOOD[at + from.len()..]].concat();
            std::fs::write(&path, &text).unwrap();
            let said = Policy::read(&path).expect_err(&text).to_string();
            assert!(said.starts_with(&format!("{}:{line}: ", path.display())), "{line} {said}");
            assert!(said.contains(complaint), "{said}");
        }
    }
}
