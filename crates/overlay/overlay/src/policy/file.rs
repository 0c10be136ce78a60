//! Reads and checks policy.toml. Errors name the line, and what to write instead.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};
use std::path::Path;

use ipnet::IpNet;
use serde::Deserialize;
use shunt_config::Fault;
use toml::Spanned;

use super::selector::Requirements;
use super::shape::{parse_dscp, parse_priority, parse_rate};
use super::{Action, Default, Direction, Ends, Except, Policy, Ports, Protocol, Rule, Selector, Shape};

impl Policy {
    /// Reads a policy file.
    pub fn read(path: &Path) -> Result<Policy, Fault> {
        Policy::parse(path, &shunt_config::read_text(path)?)
    }

    pub(crate) fn parse(path: &Path, text: &str) -> Result<Policy, Fault> {
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

/// The groups of containers that have names, under `[labels]`.
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
    protocol: Option<Spanned<Protocol>>,
    direction: Option<Direction>,
    from: Option<Spanned<Vec<Spanned<WrittenEnds>>>>,
    to: Option<Spanned<Vec<Spanned<WrittenEnds>>>>,
    ports: Option<Spanned<Vec<Spanned<NumberOrText>>>>,
    source_ports: Option<Spanned<Vec<Spanned<NumberOrText>>>>,
    rate: Option<Spanned<String>>,
    container_rate: Option<Spanned<String>>,
    dscp: Option<Spanned<NumberOrText>>,
    priority: Option<Spanned<NumberOrText>>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a prefix, an address, a name of [labels], or a table with labels, namespace and namespace-labels, or with prefix and except"
)]
enum WrittenEnds {
    Text(String),
    Table(WrittenTable),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct WrittenTable {
    prefix: Option<String>,
    except: Option<Vec<String>>,
    labels: Option<String>,
    namespace: Option<String>,
    namespace_labels: Option<String>,
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
        let ends_of = |written: &Option<Spanned<Vec<Spanned<WrittenEnds>>>>, key: &str| match written {
            None => Ok(None),
            Some(written) => ends(key, written, labels).map(Some),
        };
        Ok(Rule {
            name: self.name.get_ref().clone(),
            action: self.action,
            protocol: self.protocol()?,
            direction: self.direction,
            from: ends_of(&self.from, "from")?,
            to: ends_of(&self.to, "to")?,
            ports: self.ports.as_ref().map(|it| ports("ports", it)).transpose()?,
            source_ports: self.source_ports.as_ref().map(source_ports).transpose()?,
            shape: self.shape()?,
        })
    }

    /// Returns the protocol. The kernel has no equivalent of some keys for UDP.
    fn protocol(&self) -> Result<Protocol, Wrong> {
        let Some(protocol) = &self.protocol else { return Ok(Protocol::Tcp) };
        let has_names = self.ports.as_ref().is_some_and(|ports| {
            ports.get_ref().iter().any(|it| it.get_ref().text().chars().any(char::is_alphabetic))
        });
        let cannot = match protocol.get_ref() {
            Protocol::Tcp => None,
            _ if self.action == Action::Overlay => Some("action = \"overlay\": UDP never leaves it"),
            _ if self.direction.is_some() => Some("direction"),
            _ if has_names => Some("names of ports"),
            _ if self.rate.is_some() || self.container_rate.is_some() => Some("rate and container-rate"),
            _ if self.dscp.is_some() || self.priority.is_some() => Some("dscp and priority"),
            Protocol::Udp => None,
        };
        match cannot {
            None => Ok(*protocol.get_ref()),
            Some(what) => wrong(protocol.span(), format!("a rule for UDP cannot have {what}")),
        }
    }

    fn shape(&self) -> Result<Shape, Wrong> {
        let spans = [
            self.rate.as_ref().map(Spanned::span),
            self.container_rate.as_ref().map(Spanned::span),
            self.dscp.as_ref().map(Spanned::span),
            self.priority.as_ref().map(Spanned::span),
        ];
        if self.action != Action::Allow
            && let Some(span) = spans.into_iter().flatten().next()
        {
            let what = "rate, container-rate, dscp and priority are for connections that are allowed: say action = \"allow\", or leave it out";
            return wrong(span, what.into());
        }
        let located = |span: Range<usize>| move |what| Wrong { at: span.start, what };
        let rate_of = |key, it: &Spanned<String>| parse_rate(key, it.get_ref()).map_err(located(it.span()));
        let rate = self.rate.as_ref().map(|it| rate_of("rate", it)).transpose()?;
        let container_rate =
            self.container_rate.as_ref().map(|it| rate_of("container-rate", it)).transpose()?;
        if let (Some(_), Some(priority)) = (container_rate, &self.priority) {
            return wrong(priority.span(), "container-rate needs the priority: leave one of them out".into());
        }
        let dscp = self.dscp.as_ref().map(|it| parse_dscp(&it.get_ref().text()).map_err(located(it.span())));
        let priority =
            self.priority.as_ref().map(|it| parse_priority(&it.get_ref().text()).map_err(located(it.span())));
        Ok(Shape { rate, container_rate, dscp: dscp.transpose()?, priority: priority.transpose()? })
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
    let mut found = Vec::new();
    for word in written.get_ref() {
        found.extend(named(word.get_ref(), word.span(), &Labels::new())?);
    }
    not_empty(name, written.span(), found)
}

/// Returns the addresses that an entry gives by a prefix, a single address or a label.
fn named(text: &str, span: Range<usize>, labels: &Labels<'_>) -> Result<Vec<IpNet>, Wrong> {
    match (prefix(text), labels.get(text)) {
        (Some(net), _) => Ok(vec![net]),
        (None, Some(of_label)) => Ok(of_label.clone()),
        (None, None) => {
            let what = "is neither a prefix, as 10.50.1.0/24, nor an address, nor one of [labels]";
            wrong(span, format!("{text:?} {what}"))
        }
    }
}

fn not_empty<T>(key: &str, span: Range<usize>, found: Vec<T>) -> Result<Vec<T>, Wrong> {
    match found.is_empty() {
        true => wrong(span, format!("{key} is empty and matches nothing: name a container, or leave it out")),
        false => Ok(found),
    }
}

/// Returns the entries of `from` or `to`.
fn ends(
    key: &str,
    written: &Spanned<Vec<Spanned<WrittenEnds>>>,
    labels: &Labels<'_>,
) -> Result<Vec<Ends>, Wrong> {
    let mut found = Vec::new();
    for entry in written.get_ref() {
        match entry.get_ref() {
            WrittenEnds::Text(text) => {
                found.extend(named(text, entry.span(), labels)?.into_iter().map(Ends::Prefix));
            }
            WrittenEnds::Table(table) => {
                found.push(table.check().map_err(|what| Wrong { at: entry.span().start, what })?);
            }
        }
    }
    not_empty(key, written.span(), found)
}

impl WrittenTable {
    fn check(&self) -> Result<Ends, String> {
        let WrittenTable { prefix: whole, except, labels, namespace, namespace_labels } = self;
        let requirements =
            |text: &Option<String>| text.as_deref().map(str::parse::<Requirements>).transpose();
        let selector = Selector {
            labels: requirements(labels)?,
            namespace: namespace.clone(),
            namespace_labels: requirements(namespace_labels)?,
        };
        let net = |text: &String| {
            prefix(text)
                .ok_or_else(|| format!("{text:?} is neither a prefix, as 10.50.1.0/24, nor an address"))
        };
        match (whole, except, selector == Selector::default()) {
            (None, None, false) => Ok(Ends::Selected(selector)),
            (Some(whole), except, true) => {
                let (whole, except) = (net(whole)?, except.iter().flatten().map(net));
                let except = except.collect::<Result<Vec<_>, _>>()?;
                match except.iter().find(|it| !whole.contains(*it)) {
                    Some(outside) => {
                        Err(format!("{outside} is not within {whole}, so it needs no exception"))
                    }
                    None if except.is_empty() => Ok(Ends::Prefix(whole)),
                    None => Ok(Ends::Except(Except { prefix: whole, except })),
                }
            }
            _ => Err("say either labels, namespace and namespace-labels, or prefix and except".to_owned()),
        }
    }
}

fn prefix(text: &str) -> Option<IpNet> {
    text.parse::<IpNet>().or_else(|_| text.parse().map(|address: std::net::IpAddr| address.into())).ok()
}

/// Parses a list of port numbers, of ranges such as "6000-6010", and of names.
fn ports(key: &str, written: &Spanned<Vec<Spanned<NumberOrText>>>) -> Result<Vec<Ports>, Wrong> {
    if written.get_ref().is_empty() {
        return wrong(
            written.span(),
            format!("{key} is empty and matches nothing: name one, or leave it out"),
        );
    }
    let parse = |word: &Spanned<NumberOrText>| {
        let text = word.get_ref().text();
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(Ports::Range(first..=last)),
            _ if text.chars().any(char::is_alphabetic) => Ok(Ports::Named(text)),
            _ => wrong(word.span(), format!("{text} is no port: say 80, or a range, as \"6000-6010\"")),
        }
    };
    written.get_ref().iter().map(parse).collect()
}

/// Parses a list of the connecting container's ports, which have no names.
fn source_ports(written: &Spanned<Vec<Spanned<NumberOrText>>>) -> Result<Vec<RangeInclusive<u16>>, Wrong> {
    let range = |port| match port {
        Ports::Range(range) => Ok(range),
        Ports::Named(name) => wrong(written.span(), format!("{name:?}: only the server's ports have names")),
    };
    ports("source-ports", written)?.into_iter().map(range).collect()
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
