//! Reads the types of a service from its object (BTF), as far as its state needs them.

use object::{Object, ObjectSection};
use serde_json::{Map, Value};

/// The types of an object.
#[derive(Clone, Debug, Default)]
pub(crate) struct Types {
    /// The first element is [`VOID`], because types are counted from 1.
    types: Vec<Type>,
}

#[derive(Clone, Debug, Default)]
struct Type {
    name: String,
    kind: u32,
    /// The size, or the type that this one refers to.
    size: u32,
    members: Vec<Member>,
    /// Of an array: the type of an element, and their number.
    elements: (u32, u32),
}

/// A member of a struct.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) of: u32,
    /// In bytes.
    pub(crate) offset: usize,
}

static VOID: Type = Type { name: String::new(), kind: 0, size: 0, members: Vec::new(), elements: (0, 0) };

const INT: u32 = 1;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// The kinds that have the layout of the type that they refer to: typedef, volatile, const, restrict
/// and type tags.
const SAME: [u32; 5] = [8, 9, 10, 11, 18];

/// A cursor over numbers in the byte order of this machine, for which the object was made.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&mut self) -> Option<u32> {
        let (word, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*word))
    }
}

impl Types {
    /// Reads the types of an object, or returns `None` if it has none.
    pub(crate) fn read(object: &[u8]) -> Option<Types> {
        let file = object::File::parse(object).ok()?;
        let data = file.section_by_name(".BTF")?.data().ok()?;
        // Magic and version, then the length of this header, and the places of both parts behind it.
        let mut header = Reader(data.get(4..)?);
        let length = header.word()? as usize;
        let [types_at, types_len, names_at, names_len] =
            [header.word()?, header.word()?, header.word()?, header.word()?].map(|word| word as usize);
        let part = |at: usize, len: usize| data.get(length + at..length + at + len);
        let names = part(names_at, names_len)?;
        let mut rest = Reader(part(types_at, types_len)?);
        let mut types = vec![Type::default()];
        while !rest.0.is_empty() {
            types.push(read_type(&mut rest, names)?);
        }
        Some(Types { types })
    }

    /// Returns the members of the struct with this name.
    pub(crate) fn members_of(&self, name: &str) -> Option<&[Member]> {
        let found = self.types.iter().find(|one| one.kind == STRUCT && one.name == name)?;
        Some(&found.members)
    }

    /// Returns the type that has the layout of this one.
    fn resolve(&self, mut of: u32) -> &Type {
        // A chain is short. A faulty object could have a cycle.
        for _ in 0..16 {
            let found = self.types.get(of as usize).unwrap_or(&VOID);
            if !SAME.contains(&found.kind) {
                return found;
            }
            of = found.size;
        }
        &VOID
    }

    pub(crate) fn name(&self, of: u32) -> &str {
        &self.resolve(of).name
    }

    /// Returns the members of a struct; other types have none.
    pub(crate) fn members(&self, of: u32) -> &[Member] {
        &self.resolve(of).members
    }

    /// Returns the type and the number of an array's elements.
    pub(crate) fn elements(&self, of: u32) -> Option<(u32, usize)> {
        let found = self.resolve(of);
        (found.kind == ARRAY).then_some((found.elements.0, found.elements.1 as usize))
    }

    pub(crate) fn size(&self, of: u32) -> usize {
        let found = self.resolve(of);
        match found.kind {
            ARRAY => self.size(found.elements.0) * found.elements.1 as usize,
            INT | STRUCT | UNION | 6 | 19 => found.size as usize,
            _ => 8,
        }
    }

    /// Returns a value of this type as JSON: numbers, objects and arrays. Arrays of bytes are text.
    pub(crate) fn value(&self, of: u32, bytes: &[u8]) -> Value {
        let found = self.resolve(of);
        match found.kind {
            STRUCT => {
                let member = |member: &Member| {
                    let value = self.value(member.of, bytes.get(member.offset..).unwrap_or_default());
                    (member.name.clone(), value)
                };
                Value::Object(found.members.iter().map(member).collect::<Map<_, _>>())
            }
            ARRAY => {
                let (element, count) = (found.elements.0, found.elements.1 as usize);
                let size = self.size(element).max(1);
                if size == 1 {
                    let bytes = bytes.get(..count).unwrap_or(bytes);
                    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                    return bytes[..end].escape_ascii().to_string().into();
                }
                bytes.chunks(size).take(count).map(|chunk| self.value(element, chunk)).collect()
            }
            _ => {
                let size = self.size(of).min(8);
                let mut word = [0; 8];
                word[..size].copy_from_slice(bytes.get(..size).unwrap_or(&[0; 8][..size]));
                u64::from_ne_bytes(word).into()
            }
        }
    }
}

fn read_type(rest: &mut Reader<'_>, names: &[u8]) -> Option<Type> {
    let name = |at: u32| {
        let bytes = names.get(at as usize..).unwrap_or_default();
        String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
    };
    let (named, info, size) = (rest.word()?, rest.word()?, rest.word()?);
    let (kind, count) = (info >> 24 & 0x1f, info & 0xffff);
    let mut new = Type { name: name(named), kind, size, ..Type::default() };
    match kind {
        ARRAY => {
            let (element, _, count) = (rest.word()?, rest.word()?, rest.word()?);
            new.elements = (element, count);
        }
        STRUCT | UNION => {
            for _ in 0..count {
                let (named, of, offset) = (rest.word()?, rest.word()?, rest.word()?);
                // The upper byte is the size of a bit field, if the struct has any.
                let bits = if info >> 31 == 1 { offset & 0xff_ffff } else { offset };
                new.members.push(Member { name: name(named), of, offset: bits as usize / 8 });
            }
        }
        // What the others have behind them: integers, variables and tags one word, the members of
        // enums and function prototypes two, those of sections and of wide enums three.
        _ => {
            let words = match kind {
                INT | 14 | 17 => 1,
                6 | 13 => 2 * count,
                15 | 19 => 3 * count,
                _ => 0,
            };
            for _ in 0..words {
                rest.word()?;
            }
        }
    }
    Some(new)
}
