//! A node of a YAML document, with its line.

use saphyr::{LoadableYamlNode, MarkedYaml, Scalar, ScanError, YamlData};

/// An error, and its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) line: usize,
    pub(super) what: String,
}

/// A node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<'a>(&'a MarkedYaml<'a>);

/// Parses all documents of a text.
pub(super) fn parse(text: &str) -> Result<Vec<MarkedYaml<'_>>, Wrong> {
    let wrong = |error: ScanError| Wrong { line: error.marker().line(), what: error.info().to_owned() };
    MarkedYaml::load_from_str(text).map_err(wrong)
}

impl<'a> Node<'a> {
    pub(super) fn of(yaml: &'a MarkedYaml<'a>) -> Node<'a> {
        Node(yaml)
    }

    pub(super) fn line(self) -> usize {
        self.0.span.start.line()
    }

    pub(super) fn wrong<T>(self, what: impl Into<String>) -> Result<T, Wrong> {
        Err(Wrong { line: self.line(), what: what.into() })
    }

    /// Returns `true` for an absent value: null, or an empty document.
    pub(super) fn is_null(self) -> bool {
        matches!(self.0.data, YamlData::Value(Scalar::Null) | YamlData::BadValue)
    }

    /// Returns the value of a key, unless it is null.
    pub(super) fn get(self, key: &str) -> Option<Node<'a>> {
        self.0.data.as_mapping_get(key).map(Node).filter(|it| !it.is_null())
    }

    /// Returns the value of a key that must be there.
    pub(super) fn need(self, key: &str) -> Result<Node<'a>, Wrong> {
        match self.get(key) {
            Some(value) => Ok(value),
            None => self.wrong(format!("there is no {key}")),
        }
    }

    /// Returns all keys and values.
    pub(super) fn entries(self) -> Result<Vec<(&'a str, Node<'a>)>, Wrong> {
        let Some(mapping) = self.0.data.as_mapping() else {
            return self.wrong("expected a mapping");
        };
        mapping.iter().map(|(key, value)| Ok((Node(key).text()?, Node(value)))).collect()
    }

    /// Checks that there are no other keys.
    pub(super) fn only(self, known: &[&str]) -> Result<(), Wrong> {
        let Some(mapping) = self.0.data.as_mapping() else {
            return self.wrong("expected a mapping");
        };
        for key in mapping.keys().map(Node) {
            let name = key.text()?;
            if !known.contains(&name) {
                let suggestion = shunt_config::suggestion(name, known.iter().copied());
                return key.wrong(format!("there is no key {name}{suggestion}"));
            }
        }
        Ok(())
    }

    pub(super) fn items(self) -> Result<Vec<Node<'a>>, Wrong> {
        match self.0.data.as_vec() {
            Some(items) => Ok(items.iter().map(Node).collect()),
            None => self.wrong("expected a list"),
        }
    }

    /// Returns the items of a key's list. An absent list is empty.
    pub(super) fn list(self, key: &str) -> Result<Vec<Node<'a>>, Wrong> {
        self.get(key).map_or_else(|| Ok(Vec::new()), Node::items)
    }

    pub(super) fn text(self) -> Result<&'a str, Wrong> {
        match self.0.data.as_str() {
            Some(text) => Ok(text),
            None => self.wrong("expected a string: put it between quotation marks"),
        }
    }

    pub(super) fn number(self) -> Option<i64> {
        self.0.data.as_integer()
    }

    pub(super) fn is_true(self) -> bool {
        self.0.data.as_bool() == Some(true)
    }
}
