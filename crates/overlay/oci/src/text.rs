//! Changes JSON text in place, so that only the added or removed parts differ.
//!
//! Numbers, escapes, order, unknown keys and white space are not decoded. So they cannot be written
//! back in another form.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Result;
use serde_json::value::RawValue;

/// An object or an array in a text, with the positions of its items.
#[derive(Debug)]
pub(crate) struct Container<'t> {
    /// The position after the opening bracket.
    inside: usize,
    items: Vec<Item<'t>>,
}

/// A member of an object, or an element of an array.
#[derive(Debug)]
pub(crate) struct Item<'t> {
    /// The name of a member. Empty for an element.
    name: String,
    /// The position of a member's name, or of an element.
    start: usize,
    value: &'t str,
    end: usize,
}

/// A change: the text that replaces a range.
#[derive(Debug)]
pub(crate) struct Splice {
    at: Range<usize>,
    text: String,
}

impl<'t> Container<'t> {
    /// Parses the object `value`, which is a part of `text`.
    pub(crate) fn object(text: &'t str, value: &'t str) -> Result<Container<'t>> {
        let Members(members) = serde_json::from_str(value)?;
        let item = |(name, value): (&'t RawValue, &'t RawValue)| {
            Ok(Item { name: serde_json::from_str(name.get())?, ..Item::new(text, name.get(), value.get()) })
        };
        Ok(Container {
            inside: offset(text, value) + 1,
            items: members.into_iter().map(item).collect::<Result<_>>()?,
        })
    }

    /// Parses the array `value`, which is a part of `text`.
    pub(crate) fn array(text: &'t str, value: &'t str) -> Result<Container<'t>> {
        let elements: Vec<&'t RawValue> = serde_json::from_str(value)?;
        let items = elements.into_iter().map(|value| Item::new(text, value.get(), value.get())).collect();
        Ok(Container { inside: offset(text, value) + 1, items })
    }

    /// Returns the text of the member `name`. If there are several, the last one counts, as in Go's
    /// decoder.
    pub(crate) fn member(&self, name: &str) -> Option<&'t str> {
        self.items.iter().rev().find(|item| item.name == name).map(|item| item.value)
    }

    /// Returns the elements, or the values of the members.
    pub(crate) fn values(&self) -> impl Iterator<Item = &'t str> {
        self.items.iter().map(|item| item.value)
    }

    /// Adds items, separated by commas, after all others. The white space before the last item is
    /// repeated.
    pub(crate) fn append(&self, text: &str, added: &str) -> Splice {
        let Some(last) = self.items.last() else {
            return Splice { at: self.inside..self.inside, text: added.to_owned() };
        };
        let before = &text[..last.start];
        let space = &before[before.trim_end_matches(WHITE_SPACE).len()..];
        Splice { at: last.end..last.end, text: format!(",{space}{added}") }
    }

    /// Removes the member `name` and the comma that is no longer needed. This reverses
    /// [`Container::append`].
    pub(crate) fn remove(&self, name: &str) -> Option<Splice> {
        let position = self.items.iter().rposition(|item| item.name == name)?;
        let item = &self.items[position];
        let previous = position.checked_sub(1).map(|previous| &self.items[previous]);
        let at = match (previous, self.items.get(position + 1)) {
            (Some(previous), _) => previous.end..item.end,
            (None, Some(next)) => item.start..next.start,
            (None, None) => item.start..item.end,
        };
        Some(Splice { at, text: String::new() })
    }

    /// Returns whether there is no item except `name`.
    pub(crate) fn is_only(&self, name: &str) -> bool {
        self.items.iter().all(|item| item.name == name)
    }
}

impl<'t> Item<'t> {
    fn new(text: &str, begins_with: &str, value: &'t str) -> Item<'t> {
        let end = offset(text, value) + value.len();
        Item { name: String::new(), start: offset(text, begins_with), value, end }
    }
}

impl Splice {
    /// Replaces `value`, a part of `text`, by `new`.
    pub(crate) fn replace(text: &str, value: &str, new: String) -> Splice {
        let start = offset(text, value);
        Splice { at: start..start + value.len(), text: new }
    }

    /// Returns the text with all changes applied. They must not overlap.
    pub(crate) fn apply(mut splices: Vec<Splice>, text: &str) -> String {
        splices.sort_by_key(|splice| splice.at.start);
        let mut changed = String::with_capacity(text.len() + 1024);
        let mut kept = 0;
        for splice in splices {
            changed.push_str(&text[kept..splice.at.start]);
            changed.push_str(&splice.text);
            kept = splice.at.end;
        }
        changed.push_str(&text[kept..]);
        changed
    }
}

/// The white space of JSON.
const WHITE_SPACE: [char; 4] = [' ', '\t', '\n', '\r'];

/// Returns the position of `part`, a slice of `text`.
fn offset(text: &str, part: &str) -> usize {
    part.as_ptr().addr() - text.as_ptr().addr()
}

/// All members of an object in their order, including those with equal names.
struct Members<'t>(Vec<(&'t RawValue, &'t RawValue)>);

impl<'t> Deserialize<'t> for Members<'t> {
    fn deserialize<D: Deserializer<'t>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Collect;
        impl<'t> Visitor<'t> for Collect {
            type Value = Members<'t>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'t>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> Container<'_> {
        Container::object(text, text.trim()).unwrap()
    }

    #[test]
    fn what_is_added_is_spaced_as_the_rest_and_can_be_taken_away_again() {
        for (text, with) in [
            ("{}", r#"{"b": 2}"#),
            (" { } ", r#" {"b": 2 } "#),
            (r#"{"a":1}"#, r#"{"a":1,"b": 2}"#),
            ("{\n    \"a\": 1\n}\n", "{\n    \"a\": 1,\n    \"b\": 2\n}\n"),
            (
                "{\"a\" :\t1.0e+5 ,\r\n\"é\\u00e9\":[ ]}",
                "{\"a\" :\t1.0e+5 ,\r\n\"é\\u00e9\":[ ],\r\n\"b\": 2}",
            ),
        ] {
            let added = Splice::apply(vec![object(text).append(text, r#""b": 2"#)], text);
            assert_eq!(added, with);
            let removed = object(&added).remove("b").unwrap();
            assert_eq!(Splice::apply(vec![removed], &added), text);
        }
    }

    #[test]
    fn a_member_is_taken_from_anywhere() {
        for (text, without) in [
            (r#"{"x": 1, "a": 2}"#, r#"{"a": 2}"#),
            (r#"{"a": 2 , "x": 1 , "c": 3}"#, r#"{"a": 2 , "c": 3}"#),
            (r#"{ "x": {} }"#, "{  }"),
        ] {
            let removed = object(text).remove("x").unwrap();
            assert_eq!(Splice::apply(vec![removed], text), without);
        }
        assert!(object("{}").remove("x").is_none());
    }

    #[test]
    fn what_is_no_object_or_array_is_not_taken_for_one() {
        for text in ["", "[]", "1", "{", r#"{"a":}"#, r#"{"a":1} x"#, r#"{"a":1,}"#, "{1:2}"] {
            assert!(Container::object(text, text).is_err(), "{text}");
        }
        for text in ["", "{}", "[1", "[,]"] {
            assert!(Container::array(text, text).is_err(), "{text}");
        }
    }
}
