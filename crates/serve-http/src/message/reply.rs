//! Parses and checks the head of a backend's reply, and writes it again for the client.

use httparse::{Header, Status};

use super::Parsed;
use super::fields::{self, Framing, Name, Positions, Slots, Version, elements, has_whole_line_ends};

/// Why a reply is not forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadReply {
    /// It is no HTTP/1 reply, or one of its fields is malformed.
    Malformed,
    /// Its head is longer than the limit.
    TooLong,
    /// Its framing is ambiguous.
    Framing,
}

/// The checked head of a reply.
#[derive(Debug)]
pub struct Reply<'a, 'f> {
    /// The status code.
    pub status: u16,
    /// How the end of the body is found.
    pub framing: Framing,
    /// The backend keeps the connection open.
    pub keeps_alive: bool,
    /// The protocol that the backend switches to.
    pub upgrade: Option<&'a [u8]>,
    /// The bytes of the head.
    pub length: usize,
    reason: &'a str,
    fields: &'f [Header<'a>],
    omitted: Positions,
}

/// Parses and checks the head of a reply at the beginning of `bytes`. `to_head` means that it
/// answers a HEAD, and so has no body.
pub fn parse<'a, 'f>(
    bytes: &'a [u8],
    slots: &'f mut Slots<'a>,
    limit: usize,
    to_head: bool,
) -> Result<Parsed<Reply<'a, 'f>>, BadReply> {
    let mut head = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let length = match parser.parse_response_with_uninit_headers(&mut head, bytes, slots) {
        Ok(Status::Complete(length)) if length <= limit => length,
        Ok(Status::Partial) if bytes.len() < limit => return Ok(Parsed::Incomplete),
        Ok(_) => return Err(BadReply::TooLong),
        Err(_) => return Err(BadReply::Malformed),
    };
    let status = head.code.unwrap_or_default();
    if !has_whole_line_ends(&bytes[..length]) || !(100..600).contains(&status) {
        return Err(BadReply::Malformed);
    }
    let version = Version::of(head.version);
    let (mut omitted, mut size, mut coding, mut upgrade) = (Positions::default(), None, None, None);
    let (mut closes, mut keeps) = (false, false);
    for (position, field) in head.headers.iter().enumerate() {
        match Name::of(field.name) {
            Name::ContentLength if size.is_some() => return Err(BadReply::Framing),
            Name::ContentLength => size = Some(fields::length(field.value).ok_or(BadReply::Framing)?),
            Name::TransferEncoding if coding.is_some() => return Err(BadReply::Framing),
            Name::TransferEncoding => coding = Some(field.value),
            Name::Connection => {
                for option in elements(field.value) {
                    closes |= option.eq_ignore_ascii_case(b"close");
                    keeps |= option.eq_ignore_ascii_case(b"keep-alive");
                    omit(head.headers, option, &mut omitted)?;
                }
            }
            Name::Upgrade => upgrade = Some(field.value),
            Name::KeepAlive | Name::ProxyConnection => {}
            Name::Lookalike => return Err(BadReply::Framing),
            _ => continue,
        }
        omitted.add(position);
    }
    let has_no_body = to_head || status < 200 || matches!(status, 204 | 304);
    let framing = match (coding, size) {
        (Some(_), Some(_)) => return Err(BadReply::Framing),
        (Some(value), None) => {
            if version == Version::Http10 || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(BadReply::Framing);
            }
            Framing::Chunked
        }
        (None, Some(size)) => Framing::Length(size),
        (None, None) if has_no_body => Framing::None,
        (None, None) => Framing::UntilClose,
    };
    Ok(Parsed::Complete(Reply {
        status,
        framing,
        keeps_alive: if version == Version::Http11 { !closes } else { keeps && !closes },
        upgrade,
        length,
        reason: head.reason.unwrap_or_default(),
        fields: head.headers,
        omitted,
    }))
}

/// Omits the field that `Connection` names.
fn omit(fields: &[Header<'_>], option: &[u8], omitted: &mut Positions) -> Result<(), BadReply> {
    for (position, field) in fields.iter().enumerate() {
        if field.name.as_bytes().eq_ignore_ascii_case(option) {
            if Name::of(field.name).is_essential() {
                return Err(BadReply::Framing);
            }
            omitted.add(position);
        }
    }
    Ok(())
}

/// What the client's connection does after the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It stays open, as HTTP/1.1 has it.
    Stays,
    /// It stays open, and a client of HTTP/1.0 is notified of it.
    KeepAlive,
    /// It is closed.
    Close,
    /// It changes to another protocol.
    Upgrade,
}

impl After {
    /// Returns what the connection of a client of this version does, if it stays open or not.
    pub fn of(stays: bool, version: Version) -> After {
        match (stays, version) {
            (false, _) => After::Close,
            (true, Version::Http11) => After::Stays,
            (true, Version::Http10) => After::KeepAlive,
        }
    }
}

impl<'a> Reply<'a, '_> {
    /// Returns true if the reply is not the final one.
    pub fn is_interim(&self) -> bool {
        self.status < 200 && self.status != 101
    }

    /// Returns the values of all fields with a name that are forwarded.
    pub fn values<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'a [u8]> + 's
    where
        'a: 's,
    {
        let fields = self.fields.iter().enumerate();
        let named =
            fields.filter(move |(at, field)| field.name.eq_ignore_ascii_case(name) && !self.omitted.has(*at));
        named.map(|(_, field)| field.value)
    }

    /// Appends the status line and the fields for a cache: those that are forwarded, without the framing
    /// and the age.
    pub(crate) fn write_stored(&self, out: &mut Vec<u8>, is_kept: impl Fn(&str) -> bool) {
        self.write_line(out);
        self.write_stored_fields(out, is_kept);
    }

    /// Appends these fields only.
    pub(crate) fn write_stored_fields(&self, out: &mut Vec<u8>, is_kept: impl Fn(&str) -> bool) {
        for (position, field) in self.fields.iter().enumerate() {
            let is_stored = !self.omitted.has(position)
                && !field.name.eq_ignore_ascii_case("age")
                && Name::of(field.name) != Name::Trailer;
            if is_stored && is_kept(field.name) {
                fields::write(out, field.name, field.value);
            }
        }
    }

    fn write_line(&self, out: &mut Vec<u8>) {
        let digits =
            [self.status / 100, self.status / 10 % 10, self.status % 10].map(|digit| b'0' + digit as u8);
        out.extend_from_slice(b"HTTP/1.1 ");
        out.extend_from_slice(&digits);
        out.push(b' ');
        out.extend_from_slice(self.reason.as_bytes());
        out.extend_from_slice(b"\r\n");
    }

    /// Returns how the body that follows is framed. Replies to HEAD, and some statuses, have none,
    /// whatever their fields declare.
    pub fn body(&self, to_head: bool) -> Framing {
        if to_head || self.status < 200 || matches!(self.status, 204 | 304) {
            Framing::None
        } else {
            self.framing
        }
    }

    /// Appends the head that the client gets. `is_chunked` is false if the client cannot decode
    /// chunks.
    pub fn write(&self, after: After, is_chunked: bool, out: &mut Vec<u8>) {
        self.write_line(out);
        for (position, field) in self.fields.iter().enumerate() {
            if !self.omitted.has(position) {
                fields::write(out, field.name, field.value);
            }
        }
        match self.framing {
            // These statuses have no such field (RFC 9110, section 8.6).
            _ if self.status < 200 || self.status == 204 => {}
            Framing::Length(length) => {
                out.extend_from_slice(b"Content-Length: ");
                decimal(length, out);
                out.extend_from_slice(b"\r\n");
            }
            Framing::Chunked if is_chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
            _ => {}
        }
        match after {
            After::Stays => {}
            After::KeepAlive => out.extend_from_slice(b"Connection: keep-alive\r\n"),
            After::Close => out.extend_from_slice(b"Connection: close\r\n"),
            After::Upgrade => {
                fields::write(out, "Upgrade", self.upgrade.unwrap_or_default());
                out.extend_from_slice(b"Connection: upgrade\r\n");
            }
        }
        out.extend_from_slice(b"\r\n");
    }
}

/// Appends a number.
pub(crate) fn decimal(mut number: u64, out: &mut Vec<u8>) {
    let (mut digits, mut at) = ([0; 20], 20);
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return out.extend_from_slice(&digits[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::no_fields;
    use super::*;

    fn rewritten(bytes: &[u8], to_head: bool, after: After) -> Result<(Framing, String), BadReply> {
        let mut slots = no_fields();
        match parse(bytes, &mut slots, 1000, to_head)? {
            Parsed::Incomplete => panic!("incomplete"),
            Parsed::Complete(reply) => {
                let mut out = Vec::new();
                reply.write(after, true, &mut out);
                Ok((reply.body(to_head), String::from_utf8(out).unwrap()))
            }
        }
    }

    #[test]
    fn reply_is_written_without_the_fields_of_its_connection() {
        let bytes = b"HTTP/1.1 200 OK\r\nConnection: x-a, keep-alive\r\nX-A: 1\r\nKeep-Alive: 5\r\nB:  2 \r\nContent-Length: 3\r\n\r\n";
        let written = "HTTP/1.1 200 OK\r\nB: 2\r\nContent-Length: 3\r\n\r\n".to_owned();
        assert_eq!(rewritten(bytes, false, After::Stays), Ok((Framing::Length(3), written)));
    }

    #[test]
    fn status_and_method_decide_about_the_body() {
        for (head, to_head, framing) in [
            ("200 OK\r\nContent-Length: 3", true, Framing::None),
            ("200 OK\r\nTransfer-Encoding: Chunked", false, Framing::Chunked),
            ("204 No Content", false, Framing::None),
            ("304 Not Modified\r\nContent-Length: 3", false, Framing::None),
            ("103 Early Hints\r\nLink: x", false, Framing::None),
            ("200 OK\r\nA: b", false, Framing::UntilClose),
            ("200\r\nA: b", false, Framing::UntilClose),
        ] {
            let head = format!("HTTP/1.1 {head}\r\n\r\n");
            assert_eq!(rewritten(head.as_bytes(), to_head, After::Close).unwrap().0, framing, "{head}");
        }
    }

    #[test]
    fn ambiguous_reply_is_refused() {
        for (head, why) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", BadReply::Framing),
            ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n", BadReply::Framing),
            ("HTTP/1.1 200 OK\r\nContent-Length: 3, 3\r\n\r\n", BadReply::Framing),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", BadReply::Framing),
            ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", BadReply::Framing),
            ("HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 3\r\n\r\n", BadReply::Framing),
            ("HTTP/1.1 200 OK\nContent-Length: 3\r\n\r\n", BadReply::Malformed),
            ("HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", BadReply::Malformed),
            ("HTTP/1.1 200 OK\r\nA : b\r\n\r\n", BadReply::Malformed),
            ("HTTP/1.1 099 OK\r\n\r\n", BadReply::Malformed),
            ("HTTP/1.1 600 OK\r\n\r\n", BadReply::Malformed),
            ("HTTP/2.0 200 OK\r\n\r\n", BadReply::Malformed),
            ("220 smtp\r\n\r\n", BadReply::Malformed),
        ] {
            assert_eq!(rewritten(head.as_bytes(), false, After::Stays).unwrap_err(), why, "{head}");
        }
        let long = format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "a".repeat(1000));
        assert_eq!(rewritten(long.as_bytes(), false, After::Stays).unwrap_err(), BadReply::TooLong);
    }
}
