//! The parts of a service's state, as its `struct shunt_state` declares them: counters, histograms and
//! tables. `include/shunt/state.h` has their types.

use serde_json::{Value, json};

use super::btf::Types;
use super::contents::Table;
use super::store::Store;

/// The layout of a service's state.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    types: Types,
    pub(crate) parts: Vec<Part>,
}

/// A member of the state.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    offset: usize,
    pub(crate) kind: Kind,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Counter,
    Histogram,
    Array(Elements),
    Hash {
        is_lru: bool,
        sets: usize,
        slots: Elements,
        key: Field,
        value: Field,
    },
    /// A hash table whose values are the lengths of contents.
    Contents {
        sets: usize,
        slots: Elements,
        key: Field,
        value: Field,
        clocks: usize,
        contents: Elements,
    },
}

/// Consecutive elements.
#[derive(Clone, Debug)]
pub(crate) struct Elements {
    of: u32,
    offset: usize,
    size: usize,
    count: usize,
}

/// A member of an element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    of: u32,
    offset: usize,
}

/// The sum and the buckets of a histogram.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    pub(crate) sum: u64,
    pub(crate) buckets: Vec<u64>,
}

/// How full a table is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    pub(crate) entries: u64,
    pub(crate) capacity: u64,
    pub(crate) evicted: u64,
    pub(crate) refused: u64,
}

/// `SHUNT_WAYS` and `SHUNT_BUCKETS` in state.h.
const WAYS: usize = 16;
const BUCKETS: usize = 64;

impl Layout {
    /// Reads the layout from a service's object. A service without state has no parts.
    pub(crate) fn read(object: &[u8]) -> Layout {
        let types = Types::read(object).unwrap_or_default();
        let members = types.members_of("shunt_state").unwrap_or_default();
        let parts = members.iter().filter_map(|member| {
            let kind = kind(&types, member.of)?;
            Some(Part { name: member.name.clone(), offset: member.offset, kind })
        });
        let parts = parts.collect();
        Layout { types, parts }
    }

    /// Returns the entries of a part as JSON, or `None` if there is no such part.
    pub(crate) fn dump(&self, name: &str, store: &Store) -> Option<Value> {
        let part = self.parts.iter().find(|part| part.name == name)?;
        let entries = match &part.kind {
            Kind::Counter => {
                return Some(json!({ "name": name, "kind": "counter", "value": part.count(store) }));
            }
            Kind::Histogram => {
                let Observed { sum, buckets } = part.observed(store);
                let rows = buckets.iter().enumerate().filter(|(_, count)| **count > 0);
                let below = |bits: usize| 1_u64.checked_shl(bits as u32);
                let rows: Vec<Value> =
                    rows.map(|(bits, count)| json!({ "below": below(bits), "count": count })).collect();
                return Some(json!({ "name": name, "kind": "histogram", "sum": sum, "buckets": rows }));
            }
            Kind::Array(elements) => self.array(part.offset, elements, store),
            Kind::Hash { sets, slots, key, value, .. } => {
                self.hash(part.offset, *sets, slots, [*key, *value], store)
            }
            Kind::Contents { sets, slots, key, value, contents, .. } => {
                self.contents(part.offset, *sets, slots, [*key, *value], contents, store)
            }
        };
        Some(json!({ "name": name, "kind": part.kind(), "entries": entries }))
    }

    fn array(&self, part: usize, elements: &Elements, store: &Store) -> Vec<Value> {
        let entry = |index: usize| {
            let bytes = store.bytes(part + elements.offset + index * elements.size, elements.size);
            json!({ "index": index, "value": self.types.value(elements.of, &bytes) })
        };
        (0..elements.count).map(entry).collect()
    }

    fn hash(
        &self,
        part: usize,
        sets: usize,
        slots: &Elements,
        [key, value]: [Field; 2],
        store: &Store,
    ) -> Vec<Value> {
        let entry = |slot: usize| {
            let bytes = store.bytes(part + slots.offset + slot * slots.size, slots.size);
            let of = |field: Field| self.types.value(field.of, &bytes[field.offset..]);
            json!({ "key": plain(of(key)), "value": of(value) })
        };
        live(part + sets, slots.count, store).map(entry).collect()
    }

    /// Returns the keys of a content store with the beginning, the length and a checksum of each
    /// content. A content that is replaced meanwhile may have those of several.
    fn contents(
        &self,
        part: usize,
        sets: usize,
        slots: &Elements,
        fields: [Field; 2],
        contents: &Elements,
        store: &Store,
    ) -> Vec<Value> {
        let mut entries = self.hash(part, sets, slots, fields, store);
        for (entry, slot) in entries.iter_mut().zip(live(part + sets, slots.count, store)) {
            let length = entry["value"]["length"].as_u64().map_or(0, |length| length as usize);
            let at = part + contents.offset + slot * contents.size;
            let bytes = store.bytes(at, length.min(contents.size));
            let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
                (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
            });
            entry["value"] = json!({
                "length": length,
                "begins": bytes[..bytes.len().min(BEGINNING)].escape_ascii().to_string(),
                "checksum": format!("{sum:016x}"),
            });
        }
        entries
    }
}

/// The most bytes of a content that a dump shows.
const BEGINNING: usize = 64;

/// Returns the slots that lookups see. `sets` is the offset of the sets' words.
fn live(sets: usize, count: usize, store: &Store) -> impl Iterator<Item = usize> {
    (0..count).filter(move |slot| store.word(sets + slot / WAYS * 8) >> (slot % WAYS) & 1 == 1)
}

/// Returns the only member of an object, or the value itself.
fn plain(value: Value) -> Value {
    match value {
        Value::Object(members) if members.len() == 1 => {
            members.into_iter().next().map_or(Value::Null, |(_, value)| value)
        }
        value => value,
    }
}

impl Part {
    /// Returns the word for the kind.
    pub(crate) fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
            Kind::Array(_) => "array",
            Kind::Hash { is_lru: false, .. } => "hash",
            Kind::Hash { is_lru: true, .. } => "lru-hash",
            Kind::Contents { .. } => "contents",
        }
    }

    /// Returns the place of a content store, and the most bytes of its keys and contents.
    pub(crate) fn contents(&self) -> Option<(Table, usize, usize)> {
        let Kind::Contents { sets, slots, key, value, clocks, contents } = &self.kind else { return None };
        let at = |offset: usize| (self.offset + offset) as u64;
        let words = |bytes: usize| (bytes / 8) as u32;
        // Behind the key comes the length.
        let bytes = value.offset - key.offset;
        let table = Table {
            head: at(0),
            sets: at(*sets),
            clocks: at(*clocks),
            slots: at(slots.offset),
            count: (slots.count / WAYS) as u32,
            slot: words(slots.size),
            key: words(bytes),
            value_at: words(value.offset),
            value: 1,
            is_lru: 1,
            contents: at(contents.offset),
            room: contents.size as u64,
        };
        Some((table, bytes, contents.size))
    }

    /// Returns the value of a counter.
    pub(crate) fn count(&self, store: &Store) -> u64 {
        store.word(self.offset)
    }

    /// Returns the values of a histogram.
    pub(crate) fn observed(&self, store: &Store) -> Observed {
        let buckets = (1..=BUCKETS).map(|at| store.word(self.offset + 8 * at)).collect();
        Observed { sum: store.word(self.offset), buckets }
    }

    /// Returns how full a table is, or `None` if the part is none.
    pub(crate) fn fill(&self, store: &Store) -> Option<Fill> {
        match &self.kind {
            Kind::Counter | Kind::Histogram => None,
            Kind::Array(elements) => {
                let count = elements.count as u64;
                Some(Fill { entries: count, capacity: count, evicted: 0, refused: 0 })
            }
            Kind::Hash { slots, .. } | Kind::Contents { slots, .. } => {
                let [entries, refused, evicted] = [0, 1, 2].map(|at| store.word(self.offset + 8 * at));
                Some(Fill { entries, capacity: slots.count as u64, evicted, refused })
            }
        }
    }
}

/// Recognizes the type of a member of the state.
fn kind(types: &Types, of: u32) -> Option<Kind> {
    match types.name(of) {
        "shunt_counter" => return Some(Kind::Counter),
        "shunt_histogram" => return Some(Kind::Histogram),
        _ => {}
    }
    let member = |of: u32, name: &str| {
        let found = types.members(of).iter().find(|member| member.name == name)?;
        Some(Field { of: found.of, offset: found.offset })
    };
    let elements = |field: Field| {
        let (of, count) = types.elements(field.of)?;
        Some(Elements { of, offset: field.offset, size: types.size(of), count })
    };
    if let Some(field) = member(of, "elements") {
        let mut array = elements(field)?;
        array.of = member(array.of, "value")?.of;
        return Some(Kind::Array(array));
    }
    let slots = elements(member(of, "slots")?)?;
    if let Some(field) = member(of, "contents") {
        return Some(Kind::Contents {
            sets: member(of, "sets")?.offset,
            key: member(slots.of, "key")?,
            value: member(slots.of, "value")?,
            slots,
            clocks: member(of, "clocks")?.offset,
            contents: elements(field)?,
        });
    }
    Some(Kind::Hash {
        is_lru: types.name(member(of, "head")?.of) == "shunt_lru_head",
        sets: member(of, "sets")?.offset,
        key: member(slots.of, "key")?,
        value: member(slots.of, "value")?,
        slots,
    })
}
