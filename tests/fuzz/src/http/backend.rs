//! Backends of several kinds, each of which tolerates some of what others have been found to
//! tolerate. It shares no code with the proxy.

/// A request as a backend has read it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) method: Vec<u8>,
    pub(crate) target: Vec<u8>,
    pub(crate) body: Vec<u8>,
}

/// What a backend tolerates.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lenience {
    /// A line feed alone ends a line.
    line_feed: bool,
    /// Names are compared without spaces around them, and `_` is read as `-`.
    names: bool,
    /// A line that begins with a space continues the one before.
    folding: bool,
    /// Any value that contains `chunked` means chunks.
    coding: bool,
    /// Content-Length wins over Transfer-Encoding, and the last one over others; otherwise the first.
    length: bool,
    /// What follows the digits of a size or length is ignored.
    digits: bool,
}

impl Lenience {
    pub(crate) fn all() -> impl Iterator<Item = Lenience> {
        (0..64u8).map(|bits| {
            let bit = |at: u8| bits >> at & 1 == 1;
            let (line_feed, names, folding) = (bit(0), bit(1), bit(2));
            Lenience { line_feed, names, folding, coding: bit(3), length: bit(4), digits: bit(5) }
        })
    }
}

/// Returns the complete requests in these bytes.
pub(crate) fn parse(mut bytes: &[u8], lenience: Lenience) -> Vec<Seen> {
    let mut seen = Vec::new();
    while let Some(request) = one(&mut bytes, lenience) {
        seen.push(request);
    }
    seen
}

fn line<'a>(bytes: &mut &'a [u8], lenience: Lenience) -> Option<&'a [u8]> {
    let end = if lenience.line_feed {
        bytes.iter().position(|byte| *byte == b'\n')?
    } else {
        bytes.windows(2).position(|pair| pair == b"\r\n")? + 1
    };
    let (line, rest) = bytes.split_at(end + 1);
    *bytes = rest;
    Some(line.strip_suffix(b"\n")?.strip_suffix(b"\r").unwrap_or(&line[..end]))
}

fn fields(bytes: &mut &[u8], lenience: Lenience) -> Option<Vec<(String, String)>> {
    let mut fields: Vec<(String, String)> = Vec::new();
    loop {
        let line = line(bytes, lenience)?;
        if line.is_empty() {
            return Some(fields);
        }
        let text: String = line.iter().map(|byte| *byte as char).collect();
        match (fields.last_mut(), lenience.folding && text.starts_with([' ', '\t'])) {
            (Some((_, value)), true) => value.push_str(&text),
            _ => {
                let (name, value) = text.split_once(':').unwrap_or((&text, ""));
                let name = name.to_ascii_lowercase();
                let name = if lenience.names { name.trim().replace('_', "-") } else { name };
                fields.push((name, value.trim_matches([' ', '\t']).to_ascii_lowercase()));
            }
        }
    }
}

fn number(text: &str, radix: u32, lenience: Lenience) -> Option<usize> {
    let end = text.find(|char: char| !char.is_digit(radix)).unwrap_or(text.len());
    let digits = if lenience.digits { &text[..end] } else { text };
    usize::from_str_radix(digits, radix).ok()
}

fn one(bytes: &mut &[u8], lenience: Lenience) -> Option<Seen> {
    let mut words = line(bytes, lenience)?.split(|byte| *byte == b' ');
    let (method, target) = (words.next()?.to_vec(), words.next()?.to_vec());
    let fields = fields(bytes, lenience)?;
    let values = |wanted: &str| -> Vec<&str> {
        fields.iter().filter(|(name, _)| name == wanted).map(|(_, value)| value.as_str()).collect()
    };
    let codings = values("transfer-encoding");
    let is_chunked = codings
        .iter()
        .any(|value| if lenience.coding { value.contains("chunked") } else { *value == "chunked" });
    let lengths = values("content-length");
    let length = if lenience.length { lengths.last() } else { lengths.first() };
    let body = match length {
        Some(length) if !is_chunked || lenience.length => {
            let length = number(length, 10, lenience)?;
            let (body, rest) = bytes.split_at_checked(length)?;
            *bytes = rest;
            body.to_vec()
        }
        _ if is_chunked => chunks(bytes, lenience)?,
        _ => Vec::new(),
    };
    Some(Seen { method, target, body })
}

fn chunks(bytes: &mut &[u8], lenience: Lenience) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line: String = line(bytes, lenience)?.iter().map(|byte| *byte as char).collect();
        let size = number(&line, 16, lenience)?;
        if size == 0 {
            fields(bytes, lenience)?;
            return Some(body);
        }
        let (chunk, rest) = bytes.split_at_checked(size)?;
        body.extend_from_slice(chunk);
        *bytes = rest;
        line_end(bytes, lenience)?;
    }
}

fn line_end(bytes: &mut &[u8], lenience: Lenience) -> Option<()> {
    line(bytes, lenience)?.is_empty().then_some(())
}
