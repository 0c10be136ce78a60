//! Selects containers by their labels, in the syntax of `kubectl get --selector`. A selector is
//! evaluated in three values, because a label, or the whole container, may be unknown.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::workloads::{Identity, Labels, Workload};

/// Does something match a connection? `and` is the smaller value, `or` is the larger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Match {
    No,
    /// It depends on something that is not known.
    Maybe,
    Yes,
}

/// Selects the containers that match all of its parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Selector {
    /// Requirements on the labels of the container, or of its pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) labels: Option<Requirements>,
    /// The name of its namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) namespace: Option<String>,
    /// Requirements on the labels of its namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) namespace_labels: Option<Requirements>,
}

/// Requirements on labels, all of which must hold. Written as `app=web,tier in (a,b),!old`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Requirements(pub(crate) Vec<Requirement>);

/// A requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Requirement {
    pub(crate) key: String,
    pub(crate) test: Test,
}

/// A test of a label. `NotIn` also holds if there is no such label, as in Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Missing,
}

/// The label that Kubernetes gives every namespace: its name.
const NAME: &str = "kubernetes.io/metadata.name";

impl Match {
    pub(crate) fn of(matches: bool) -> Match {
        if matches { Match::Yes } else { Match::No }
    }

    /// Returns `Maybe` if it is not certain.
    pub(crate) fn and(self, other: Match) -> Match {
        self.min(other)
    }
}

impl Selector {
    pub(crate) fn matches(&self, identity: Identity<'_>) -> Match {
        match identity {
            // Only containers have labels.
            Identity::Outside => Match::No,
            Identity::Unknown => Match::Maybe,
            Identity::Known(workload) => self.selects(workload),
        }
    }

    fn selects(&self, workload: &Workload) -> Match {
        let is_in = self.namespace.is_none() || self.namespace == workload.namespace;
        let labels = self.labels.as_ref().is_none_or(|all| all.hold(&workload.labels));
        let of_namespace = match &self.namespace_labels {
            None => Match::Yes,
            Some(all) => all.hold_of_namespace(workload),
        };
        Match::of(is_in && labels).and(of_namespace)
    }
}

impl Requirements {
    fn hold(&self, labels: &Labels) -> bool {
        self.0.iter().all(|it| it.test.holds(labels.get(&it.key).map(String::as_str)))
    }

    /// Returns `Maybe` if a label of the namespace is needed and unknown. Its name is always known.
    fn hold_of_namespace(&self, workload: &Workload) -> Match {
        let holds = |it: &Requirement| match (&workload.namespace_labels, it.key.as_str()) {
            (_, NAME) => Match::of(it.test.holds(workload.namespace.as_deref())),
            (Some(labels), key) => Match::of(it.test.holds(labels.get(key).map(String::as_str))),
            (None, _) => Match::Maybe,
        };
        self.0.iter().map(holds).min().unwrap_or(Match::Yes)
    }
}

impl Test {
    pub(crate) fn holds(&self, value: Option<&str>) -> bool {
        match (self, value) {
            (Test::In(values), Some(value)) => values.iter().any(|it| it == value),
            (Test::NotIn(values), Some(value)) => values.iter().all(|it| it != value),
            (Test::Exists, value) => value.is_some(),
            (Test::Missing, value) => value.is_none(),
            (Test::In(_), None) => false,
            (Test::NotIn(_), None) => true,
        }
    }
}

impl FromStr for Requirements {
    type Err = String;

    fn from_str(text: &str) -> Result<Requirements, String> {
        let mut depth = 0;
        let parts = text.split(|each| {
            match each {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            each == ',' && depth == 0
        });
        parts.map(requirement).collect::<Result<_, _>>().map(Requirements)
    }
}

fn requirement(text: &str) -> Result<Requirement, String> {
    let text = text.trim();
    let of = |key: &str, test| {
        let key = key.trim();
        let is_key = !key.is_empty() && key.chars().all(is_of_key);
        is_key.then(|| Requirement { key: key.to_owned(), test }).ok_or_else(|| wrong(text))
    };
    let one = |value: &str| {
        let value = value.trim();
        value.chars().all(is_of_value).then(|| vec![value.to_owned()]).ok_or_else(|| wrong(text))
    };
    if let Some((key, value)) = text.split_once("!=") {
        return of(key, Test::NotIn(one(value)?));
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return of(key, Test::In(one(value)?));
    }
    if let Some(values) = text.strip_suffix(')') {
        let (head, values) = values.split_once('(').ok_or_else(|| wrong(text))?;
        let values = values.split(',').map(one).collect::<Result<Vec<_>, _>>()?.concat();
        return match head.trim().rsplit_once(char::is_whitespace) {
            Some((key, "in")) => of(key, Test::In(values)),
            Some((key, "notin")) => of(key, Test::NotIn(values)),
            _ => Err(wrong(text)),
        };
    }
    match text.strip_prefix('!') {
        Some(key) => of(key, Test::Missing),
        None => of(text, Test::Exists),
    }
}

fn wrong(text: &str) -> String {
    format!(
        "{text:?} is no requirement on a label: say app=web, app!=web, app in (web, db), app notin (web), app or !app"
    )
}

/// Docker's keys may have more characters than those of Kubernetes.
fn is_of_key(each: char) -> bool {
    each.is_alphanumeric() || "-_./:".contains(each)
}

fn is_of_value(each: char) -> bool {
    !each.is_control() && !"(),=!".contains(each)
}

impl TryFrom<String> for Requirements {
    type Error = String;

    fn try_from(text: String) -> Result<Requirements, String> {
        text.parse()
    }
}

impl From<Requirements> for String {
    fn from(requirements: Requirements) -> String {
        requirements.to_string()
    }
}

impl fmt::Display for Requirements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Requirement { key, test }) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}")?;
            match test {
                Test::In(values) if values.len() == 1 => write!(f, "{key}={}", values[0])?,
                Test::NotIn(values) if values.len() == 1 => write!(f, "{key}!={}", values[0])?,
                Test::In(values) => write!(f, "{key} in ({})", values.join(","))?,
                Test::NotIn(values) => write!(f, "{key} notin ({})", values.join(","))?,
                Test::Exists => write!(f, "{key}")?,
                Test::Missing => write!(f, "!{key}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn pod(namespace_labels: Option<Labels>) -> Workload {
        Workload {
            name: "pod".to_owned(),
            namespace: Some("shop".to_owned()),
            labels: labels(&[("app", "web"), ("tier", "")]),
            namespace_labels,
            ports: Default::default(),
        }
    }

    #[test]
    fn requirements_are_those_of_kubectl() {
        let all = pod(None).labels;
        for (text, holds) in [
            ("app=web", true),
            ("app == web", true),
            ("app=db", false),
            ("tier=", true),
            ("app!=db", true),
            ("app!=web", false),
            ("missing!=web", true),
            ("app in (db, web)", true),
            ("app in (db)", false),
            ("missing in (web)", false),
            ("app notin (db,web)", false),
            ("missing notin (web)", true),
            ("app", true),
            ("missing", false),
            ("!missing", true),
            ("!app", false),
            ("app=web,!missing,tier", true),
            ("app=web,app in (a,b)", false),
            ("com.docker.compose/project:x!=1", true),
        ] {
            let read: Requirements = text.parse().unwrap();
            assert_eq!(read.hold(&all), holds, "{text}");
            assert_eq!(read.to_string().parse::<Requirements>().unwrap(), read, "{text}");
        }
        for text in
            ["", "=web", "app=(web)", "app in web", "app of (web)", "app in (a", "a b", "app=a=b", "a,"]
        {
            assert!(text.parse::<Requirements>().unwrap_err().contains("say app=web"), "{text}");
        }
    }

    #[test]
    fn what_is_not_known_is_neither_selected_nor_excluded() {
        let select = |text: &str| toml::from_str::<Selector>(text).unwrap();
        let known = pod(Some(labels(&[("team", "x")])));
        let bare = pod(None);
        for (text, of_known, of_bare) in [
            ("labels = 'app=web'\nnamespace = 'shop'", Match::Yes, Match::Yes),
            ("labels = 'app=web'\nnamespace = 'other'", Match::No, Match::No),
            ("namespace-labels = 'team=x'", Match::Yes, Match::Maybe),
            ("namespace-labels = 'team!=x'", Match::No, Match::Maybe),
            ("namespace-labels = 'team=x'\nlabels = 'app=db'", Match::No, Match::No),
            ("namespace-labels = 'kubernetes.io/metadata.name=shop'", Match::Yes, Match::Yes),
            ("namespace-labels = 'kubernetes.io/metadata.name!=shop,team'", Match::No, Match::No),
        ] {
            let selector = select(text);
            assert_eq!(selector.matches(Identity::Known(&known)), of_known, "{text}");
            assert_eq!(selector.matches(Identity::Known(&bare)), of_bare, "{text}");
            assert_eq!(selector.matches(Identity::Unknown), Match::Maybe);
            assert_eq!(selector.matches(Identity::Outside), Match::No);
            let line = serde_json::to_string(&selector).unwrap();
            assert_eq!(serde_json::from_str::<Selector>(&line).unwrap(), selector);
        }
    }
}
