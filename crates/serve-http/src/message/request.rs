//! Parses and checks the head of a request, and writes it again for a backend.

use httparse::{Error, Header, Status};
use memchr::memchr;

use super::Parsed;
use super::fields::{self, Framing, Name, Positions, Slots, Version, elements, has_whole_line_ends};
use super::target::{Target, is_host, same_host};

/// Declares the reasons to refuse a request, each with its status, its label and its text.
macro_rules! refusals {
    ($($variant:ident $status:literal $label:literal $text:literal;)+) => {
        /// Why a request is refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Refusal { $(#[doc = $text] $variant),+ }

        impl Refusal {
            /// All reasons.
            pub const ALL: &'static [Refusal] = &[$(Refusal::$variant),+];

            /// Returns the status code of the answer.
            pub fn status(self) -> u16 {
                match self { $(Refusal::$variant => $status),+ }
            }

            /// Returns the label in metrics.
            pub fn label(self) -> &'static str {
                match self { $(Refusal::$variant => $label),+ }
            }

            /// Returns the text for a person.
            pub fn text(self) -> &'static str {
                match self { $(Refusal::$variant => $text),+ }
            }
        }
    };
}

refusals! {
    RequestLine 400 "request-line" "the request line is not METHOD TARGET VERSION";
    LineEnd 400 "line-end" "a line does not end with CR LF";
    Field 400 "field" "a field is malformed, or continues on the next line";
    Target 400 "target" "the target is not a path, and no URL of the scheme http";
    NoHost 400 "no-host" "there is no field Host";
    Hosts 400 "hosts" "there are several fields Host";
    Host 400 "host" "the field Host is malformed, or differs from the target";
    Length 400 "length" "Content-Length is not one number";
    LengthAndCoding 400 "length-and-coding" "there are both Content-Length and Transfer-Encoding";
    Coding 400 "coding" "Transfer-Encoding is not one word chunked in HTTP/1.1";
    UnknownCoding 501 "unknown-coding" "a transfer coding other than chunked";
    Lookalike 400 "lookalike" "a field is called content_length or transfer_encoding";
    Connection 400 "connection" "Connection names a field that the message cannot do without";
    Expectation 417 "expectation" "Expect is not 100-continue";
    Method 405 "method" "CONNECT and TRACE are not supported";
    Version 505 "version" "the version is neither HTTP/1.0 nor HTTP/1.1";
    TooLong 431 "too-long" "the head is longer than the limit";
    TargetTooLong 414 "target-too-long" "the request line is longer than the limit";
    TooManyFields 431 "too-many-fields" "there are too many fields";
    Chunk 400 "chunk" "a chunk or a trailer is malformed";
}

/// The checked head of a request.
#[derive(Debug)]
pub struct Request<'a, 'f> {
    /// The method.
    pub method: &'a str,
    /// The target.
    pub target: Target<'a>,
    /// The version.
    pub version: Version,
    /// The host, from the field or the target.
    pub host: Option<&'a str>,
    /// How the end of the body is found.
    pub framing: Framing,
    /// The client expects the connection to stay open.
    pub keeps_alive: bool,
    /// The protocol that the client asks to switch to.
    pub upgrade: Option<&'a str>,
    /// The client accepts trailers.
    pub takes_trailers: bool,
    /// The bytes of the head.
    pub length: usize,
    fields: &'f [Header<'a>],
    /// Fields that are not forwarded.
    omitted: Positions,
    /// Fields about former proxies: forwarded only if the client is trusted.
    origin: Positions,
}

/// Parses and checks the head of a request at the beginning of `bytes`. A head of more than `limit`
/// bytes is refused. Empty lines before the request are skipped, and count as part of it.
pub fn parse<'a, 'f>(
    bytes: &'a [u8],
    slots: &'f mut Slots<'a>,
    limit: usize,
) -> Result<Parsed<Request<'a, 'f>>, Refusal> {
    let skipped = bytes.chunks(2).take_while(|pair| pair == b"\r\n").count() * 2;
    let rest = &bytes[skipped..];
    match rest {
        [] | [b'\r'] => return incomplete(bytes, limit),
        [b'\r' | b'\n', ..] => return Err(Refusal::LineEnd),
        _ => {}
    }
    let mut head = httparse::Request::new(&mut []);
    let length = match head.parse_with_uninit_headers(rest, slots) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) => return incomplete(bytes, limit),
        Err(error) => return Err(refusal(error, rest)),
    };
    if skipped + length > limit {
        return Err(too_long(&bytes[..limit]));
    }
    if !has_whole_line_ends(&rest[..length]) {
        return Err(Refusal::LineEnd);
    }
    let method = head.method.unwrap_or_default();
    if matches!(method, "CONNECT" | "TRACE") {
        return Err(Refusal::Method);
    }
    let version = Version::of(head.version);
    let target = Target::parse(head.path.unwrap_or_default(), method)?;
    let seen = Seen::of(head.headers, version)?;
    let host = host(&seen, &target, version)?;
    let keeps_alive =
        if version == Version::Http11 { !seen.closes } else { seen.keeps_alive && !seen.closes };
    let framing = seen.framing(version)?;
    let may_upgrade =
        seen.upgrades && version == Version::Http11 && matches!(framing, Framing::None | Framing::Length(0));
    let upgrade = seen.upgrade.filter(|_| may_upgrade);
    Ok(Parsed::Complete(Request {
        method,
        target,
        version,
        host,
        framing,
        keeps_alive,
        upgrade,
        takes_trailers: seen.takes_trailers,
        length: skipped + length,
        fields: head.headers,
        omitted: seen.omitted,
        origin: seen.origin,
    }))
}

fn incomplete<T>(bytes: &[u8], limit: usize) -> Result<Parsed<T>, Refusal> {
    if bytes.len() >= limit { Err(too_long(bytes)) } else { Ok(Parsed::Incomplete) }
}

/// Returns why a head that does not fit is refused.
fn too_long(bytes: &[u8]) -> Refusal {
    if memchr(b'\n', bytes.trim_ascii_start()).is_some() { Refusal::TooLong } else { Refusal::TargetTooLong }
}

fn refusal(error: Error, head: &[u8]) -> Refusal {
    match error {
        Error::HeaderName | Error::HeaderValue => Refusal::Field,
        Error::NewLine => Refusal::LineEnd,
        Error::TooManyHeaders => Refusal::TooManyFields,
        Error::Version => {
            let line = head.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
            let has_three_words = line.iter().filter(|byte| **byte == b' ').count() == 2;
            let is_version = matches!(line, [.., b' ', b'H', b'T', b'T', b'P', b'/', major, b'.', minor]
                if major.is_ascii_digit() && minor.is_ascii_digit());
            if is_version && has_three_words { Refusal::Version } else { Refusal::RequestLine }
        }
        _ => Refusal::RequestLine,
    }
}

fn host<'a>(seen: &Seen<'a>, target: &Target<'a>, version: Version) -> Result<Option<&'a str>, Refusal> {
    let host = match seen.host {
        None if version == Version::Http11 => return Err(Refusal::NoHost),
        None => return Ok(target.authority),
        Some(host) => std::str::from_utf8(host).map_err(|_| Refusal::Host)?,
    };
    if !is_host(host) || target.authority.is_some_and(|authority| !same_host(authority, host)) {
        return Err(Refusal::Host);
    }
    Ok(Some(host))
}

/// Facts from the fields.
#[derive(Default)]
struct Seen<'a> {
    host: Option<&'a [u8]>,
    length: Option<u64>,
    coding: Option<&'a [u8]>,
    closes: bool,
    keeps_alive: bool,
    upgrades: bool,
    upgrade: Option<&'a str>,
    takes_trailers: bool,
    omitted: Positions,
    origin: Positions,
}

impl<'a> Seen<'a> {
    fn of(fields: &[Header<'a>], version: Version) -> Result<Seen<'a>, Refusal> {
        let mut seen = Seen::default();
        let mut has_connection = false;
        for (position, field) in fields.iter().enumerate() {
            let value = field.value;
            match Name::of(field.name) {
                Name::Other | Name::Trailer | Name::MaxForwards | Name::Via => continue,
                Name::Host if seen.host.is_some() => return Err(Refusal::Hosts),
                Name::Host => {
                    seen.host = Some(value);
                    continue;
                }
                Name::ContentLength => {
                    if seen.length.is_some() {
                        return Err(Refusal::Length);
                    }
                    seen.length = Some(fields::length(value).ok_or(Refusal::Length)?);
                }
                Name::TransferEncoding if seen.coding.is_some() => return Err(Refusal::Coding),
                Name::TransferEncoding => seen.coding = Some(value),
                Name::Connection => {
                    has_connection = true;
                    seen.options(value);
                }
                Name::Expect => {
                    if !value.eq_ignore_ascii_case(b"100-continue") {
                        return Err(Refusal::Expectation);
                    }
                    // A client of HTTP/1.0 cannot get a reply 100.
                    if version == Version::Http11 {
                        continue;
                    }
                }
                Name::Upgrade => seen.upgrade = std::str::from_utf8(value).ok(),
                Name::Te => {
                    seen.takes_trailers |= elements(value).any(|it| it.eq_ignore_ascii_case(b"trailers"))
                }
                Name::KeepAlive | Name::ProxyConnection => {}
                Name::Lookalike => return Err(Refusal::Lookalike),
                Name::XForwardedFor | Name::XForwardedHost | Name::XForwardedProto | Name::Forwarded => {
                    seen.origin.add(position);
                }
            }
            seen.omitted.add(position);
        }
        if has_connection {
            seen.omit_nominated(fields)?;
        }
        Ok(seen)
    }

    fn options(&mut self, value: &[u8]) {
        for option in elements(value) {
            self.closes |= option.eq_ignore_ascii_case(b"close");
            self.keeps_alive |= option.eq_ignore_ascii_case(b"keep-alive");
            self.upgrades |= option.eq_ignore_ascii_case(b"upgrade");
        }
    }

    /// Omits the fields that `Connection` names.
    fn omit_nominated(&mut self, fields: &[Header<'a>]) -> Result<(), Refusal> {
        let connections = fields.iter().filter(|field| Name::of(field.name) == Name::Connection);
        for option in connections.flat_map(|field| elements(field.value)) {
            for (position, field) in fields.iter().enumerate() {
                if field.name.as_bytes().eq_ignore_ascii_case(option) {
                    if Name::of(field.name).is_essential() {
                        return Err(Refusal::Connection);
                    }
                    self.omitted.add(position);
                }
            }
        }
        Ok(())
    }

    fn framing(&self, version: Version) -> Result<Framing, Refusal> {
        match (self.coding, self.length) {
            (Some(_), Some(_)) => Err(Refusal::LengthAndCoding),
            (Some(_), None) if version == Version::Http10 => Err(Refusal::Coding),
            (Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => Ok(Framing::Chunked),
            (Some(coding), None) => {
                let is_word = !coding.is_empty()
                    && coding.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-');
                Err(if is_word { Refusal::UnknownCoding } else { Refusal::Coding })
            }
            (None, Some(length)) => Ok(Framing::Length(length)),
            (None, None) => Ok(Framing::None),
        }
    }
}

/// What a proxy adds to a request.
#[derive(Clone, Debug, Default)]
pub struct Additions<'a> {
    /// The client's address.
    pub client: &'a str,
    /// Add to the fields of former proxies, instead of replacing them.
    pub trusts_client: bool,
    /// Write X-Forwarded-For, X-Forwarded-Host and X-Forwarded-Proto.
    pub x_forwarded: bool,
    /// Write Forwarded (RFC 7239).
    pub forwarded: bool,
    /// The proxy's name in Via.
    pub via: Option<&'a str>,
    /// The host if the request has none.
    pub host: &'a str,
    /// The protocol that the client and the backend may switch to.
    pub upgrade: Option<&'a str>,
    /// Fields that replace the client's If-None-Match and If-Modified-Since, unless there are none.
    pub conditions: &'a [u8],
}

/// What [`Additions::conditions`] replaces.
const CONDITIONS: [&str; 2] = ["if-none-match", "if-modified-since"];

impl<'a> Request<'a, '_> {
    /// Returns true if the method may be sent twice.
    pub fn is_idempotent(&self) -> bool {
        matches!(self.method, "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE")
    }

    /// Returns a field's value, for the log.
    pub fn field(&self, name: &str) -> Option<&'a [u8]> {
        self.fields.iter().find(|field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
    }

    /// Returns the values of all fields with a name.
    pub fn values(&self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let named = move |field: &&Header<'a>| field.name.eq_ignore_ascii_case(name);
        self.fields.iter().filter(named).map(|field| field.value)
    }

    /// Returns the values of all fields with a name that a backend gets from the client as they are.
    /// Those that Connection names are not among them.
    pub fn forwarded_values(&self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let fields = self.fields.iter().enumerate();
        let named =
            fields.filter(move |(at, field)| field.name.eq_ignore_ascii_case(name) && !self.omitted.has(*at));
        named.map(|(_, field)| field.value)
    }

    /// Appends the head that a backend gets.
    pub fn write(&self, added: &Additions<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(self.method.as_bytes());
        out.push(b' ');
        self.target.write(out);
        out.extend_from_slice(b" HTTP/1.1\r\n");
        let host = self.host.unwrap_or(added.host);
        if self.host.is_none() || self.target.authority.is_some() {
            fields::write(out, "Host", host.as_bytes());
        }
        for (position, field) in self.fields.iter().enumerate() {
            let is_origin =
                added.trusts_client && self.origin.has(position) && !self.is_replaced(field, added);
            let is_host = self.target.authority.is_some() && Name::of(field.name) == Name::Host;
            let is_condition = !added.conditions.is_empty() && fields::is_one_of(field.name, &CONDITIONS);
            if (!self.omitted.has(position) || is_origin) && !is_host && !is_condition {
                fields::write(out, field.name, field.value);
            }
        }
        out.extend_from_slice(added.conditions);
        match self.framing {
            Framing::Length(length) => {
                out.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes());
            }
            Framing::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
            Framing::None | Framing::UntilClose => {}
        }
        self.write_origin(added, host, out);
        if let Some(via) = added.via {
            let version = if self.version == Version::Http11 { "1.1 " } else { "1.0 " };
            fields::write(out, "Via", [version, via].concat().as_bytes());
        }
        match (added.upgrade, self.takes_trailers) {
            (Some(protocol), _) => {
                fields::write(out, "Upgrade", protocol.as_bytes());
                out.extend_from_slice(b"Connection: upgrade\r\n");
            }
            (None, true) => out.extend_from_slice(b"TE: trailers\r\nConnection: TE\r\n"),
            (None, false) => {}
        }
        out.extend_from_slice(b"\r\n");
    }

    /// Returns true if [`Request::write_origin`] writes the field with the client added.
    fn is_replaced(&self, field: &Header<'_>, added: &Additions<'_>) -> bool {
        match Name::of(field.name) {
            Name::XForwardedFor => added.x_forwarded,
            Name::Forwarded => added.forwarded,
            _ => false,
        }
    }

    fn write_origin(&self, added: &Additions<'_>, host: &str, out: &mut Vec<u8>) {
        let former = |name: Name| {
            let fields = self.fields.iter().enumerate().filter(move |(position, field)| {
                added.trusts_client && self.origin.has(*position) && Name::of(field.name) == name
            });
            fields.map(|(_, field)| field.value)
        };
        if added.x_forwarded {
            out.extend_from_slice(b"X-Forwarded-For: ");
            for value in former(Name::XForwardedFor) {
                out.extend_from_slice(value);
                out.extend_from_slice(b", ");
            }
            out.extend_from_slice(added.client.as_bytes());
            out.extend_from_slice(b"\r\n");
            if former(Name::XForwardedProto).next().is_none() {
                out.extend_from_slice(b"X-Forwarded-Proto: http\r\n");
            }
            if former(Name::XForwardedHost).next().is_none() {
                fields::write(out, "X-Forwarded-Host", host.as_bytes());
            }
        }
        if added.forwarded {
            out.extend_from_slice(b"Forwarded: ");
            for value in former(Name::Forwarded) {
                out.extend_from_slice(value);
                out.extend_from_slice(b", ");
            }
            let quoted = if added.client.contains(':') {
                format!("\"[{}]\"", added.client)
            } else {
                added.client.to_owned()
            };
            out.extend_from_slice(format!("for={quoted};host=\"{host}\";proto=http\r\n").as_bytes());
        }
    }
}
