//! The fields of a message's head: their names that matter to a proxy, the framing that they
//! declare, and those that are not forwarded.

use std::mem::MaybeUninit;

use httparse::Header;

/// The most fields of a head.
pub const MAX_FIELDS: usize = 100;

/// Memory for the fields of a head.
pub type Slots<'a> = [MaybeUninit<Header<'a>>; MAX_FIELDS];

/// Returns memory for the fields of a head.
pub fn no_fields<'a>() -> Slots<'a> {
    [const { MaybeUninit::uninit() }; MAX_FIELDS]
}

/// The version of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.0
    Http10,
    /// HTTP/1.1
    Http11,
}

impl Version {
    pub(crate) fn of(minor: Option<u8>) -> Version {
        if minor == Some(0) { Version::Http10 } else { Version::Http11 }
    }
}

/// How the end of a body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// There is no body.
    None,
    /// It has this many bytes.
    Length(u64),
    /// It is chunked.
    Chunked,
    /// It ends with the connection: a reply only.
    UntilClose,
}

/// A field that a proxy treats differently from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Connection,
    ContentLength,
    Expect,
    Forwarded,
    Host,
    KeepAlive,
    MaxForwards,
    ProxyConnection,
    Te,
    Trailer,
    TransferEncoding,
    Upgrade,
    Via,
    XForwardedFor,
    XForwardedHost,
    XForwardedProto,
    /// A name that becomes Content-Length or Transfer-Encoding where `_` is read as `-`.
    Lookalike,
    Other,
}

/// Returns true if a field has one of these names.
pub(crate) fn is_one_of(name: &str, names: &[&str]) -> bool {
    names.iter().any(|one| name.eq_ignore_ascii_case(one))
}

impl Name {
    pub(crate) fn of(name: &str) -> Name {
        let is = |word: &str| name.eq_ignore_ascii_case(word);
        match name.len() {
            2 if is("te") => Name::Te,
            3 if is("via") => Name::Via,
            4 if is("host") => Name::Host,
            6 if is("expect") => Name::Expect,
            7 if is("upgrade") => Name::Upgrade,
            7 if is("trailer") => Name::Trailer,
            9 if is("forwarded") => Name::Forwarded,
            10 if is("connection") => Name::Connection,
            10 if is("keep-alive") => Name::KeepAlive,
            12 if is("max-forwards") => Name::MaxForwards,
            14 if is("content-length") => Name::ContentLength,
            14 if is("content_length") => Name::Lookalike,
            15 if is("x-forwarded-for") => Name::XForwardedFor,
            16 if is("x-forwarded-host") => Name::XForwardedHost,
            16 if is("proxy-connection") => Name::ProxyConnection,
            17 if is("x-forwarded-proto") => Name::XForwardedProto,
            17 if is("transfer-encoding") => Name::TransferEncoding,
            17 if is("transfer_encoding") => Name::Lookalike,
            _ => Name::Other,
        }
    }

    /// Returns true if `Connection` must not name the field, because the message would change its
    /// meaning without it.
    pub(crate) fn is_essential(self) -> bool {
        matches!(self, Name::Host | Name::ContentLength | Name::TransferEncoding | Name::Expect)
    }

    /// Returns true if a backend sees another value of the field than the client has sent, and not one
    /// that the host decides.
    pub(crate) fn differs_behind_proxy(self) -> bool {
        use Name::{
            Connection, Expect, Forwarded, KeepAlive, ProxyConnection, Te, Upgrade, Via, XForwardedFor,
        };
        matches!(
            self,
            Connection
                | Expect
                | Forwarded
                | KeepAlive
                | ProxyConnection
                | Te
                | Upgrade
                | Via
                | XForwardedFor
        )
    }

    /// Returns true if the field must not be in a trailer.
    pub(crate) fn is_forbidden_in_trailer(self, name: &str) -> bool {
        const OTHERS: [&str; 8] = [
            "authorization",
            "cache-control",
            "content-encoding",
            "content-range",
            "content-type",
            "cookie",
            "proxy-authorization",
            "set-cookie",
        ];
        self != Name::Other || is_one_of(name, &OTHERS)
    }
}

/// A set of fields of one head, by their position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Positions(u128);

impl Positions {
    pub(crate) fn add(&mut self, position: usize) {
        self.0 |= 1 << position;
    }

    pub(crate) fn has(self, position: usize) -> bool {
        self.0 >> position & 1 == 1
    }
}

/// Returns the elements of a list, without empty ones.
pub(crate) fn elements(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|element| !element.is_empty())
}

/// Returns the value of a Content-Length: digits only, without leading zeros, which some parsers
/// read as octal.
pub(crate) fn length(value: &[u8]) -> Option<u64> {
    let is_plain = match value {
        [b'0'] => true,
        [b'1'..=b'9', rest @ ..] => rest.len() < 18 && rest.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    is_plain.then(|| value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// Returns true if every line feed ends a line together with a carriage return. httparse also
/// accepts a line feed alone.
pub(crate) fn has_whole_line_ends(head: &[u8]) -> bool {
    memchr::memchr_iter(b'\n', head).all(|at| at > 0 && head[at - 1] == b'\r')
}

/// Appends a field.
pub(crate) fn write(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_digits_only() {
        for (text, value) in [("0", 0), ("7", 7), ("10", 10), ("999999999999999999", 999_999_999_999_999_999)]
        {
            assert_eq!(length(text.as_bytes()), Some(value));
        }
        for text in
            ["", "00", "07", "+1", "-1", "1 ", "1,1", "1.0", "0x1", "1000000000000000000", "a", "\u{0661}"]
        {
            assert_eq!(length(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn line_feed_alone_is_found() {
        assert!(has_whole_line_ends(b"a\r\nb\r\n\r\n") && has_whole_line_ends(b""));
        for head in [&b"\n"[..], b"a\nb\r\n", b"a\r\n\n"] {
            assert!(!has_whole_line_ends(head));
        }
    }

    #[test]
    fn names_are_found_in_any_case() {
        assert_eq!(Name::of("HOST"), Name::Host);
        assert_eq!(Name::of("transfer-Encoding"), Name::TransferEncoding);
        assert_eq!(Name::of("Transfer_Encoding"), Name::Lookalike);
        assert_eq!(Name::of("hosts"), Name::Other);
    }
}
