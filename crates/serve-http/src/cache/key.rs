//! The keys of stored replies, and the values of the fields that replies depend on.

use crate::message::Request;
use crate::message::target::same_host;

/// The key of a target: its host, in one form, the target, and what trusted proxies say of the request
/// that they got.
#[derive(Debug)]
pub(crate) struct Key {
    text: String,
    /// The end of the host, and of the target.
    ends: (usize, usize),
}

impl Key {
    /// Returns the key of a request. `trusts_client` means that a backend gets what the client says of its origin.
    pub(crate) fn of(request: &Request<'_, '_>, trusts_client: bool) -> Key {
        let host = request.host.unwrap_or("localhost");
        let host = host.strip_suffix(":80").or_else(|| host.strip_suffix(':')).unwrap_or(host);
        let mut text = String::with_capacity(request.length);
        text += host;
        text.make_ascii_lowercase();
        text.extend(request.target.parts());
        let ends = (host.len(), text.len());
        if trusts_client {
            let mut add =
                |name: &str, value: &[u8]| text += &format!("\n{name}={}", value.trim_ascii().escape_ascii());
            for name in ["x-forwarded-host", "x-forwarded-proto"] {
                request.values(name).for_each(|value| add(name, value));
            }
            let values = request.values("forwarded");
            for parameter in values.flat_map(|value| value.split(|byte| b",;".contains(byte))) {
                let parameter = parameter.trim_ascii().to_ascii_lowercase();
                if parameter.starts_with(b"host") || parameter.starts_with(b"proto") {
                    add("forwarded", &parameter);
                }
            }
        }
        Key { text, ends }
    }

    /// Returns the key as a text.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    fn host(&self) -> &str {
        &self.text[..self.ends.0]
    }

    /// Returns the key of a reference in a reply, if its host is the same.
    pub(crate) fn referred(&self, reference: &[u8]) -> Option<String> {
        let reference = std::str::from_utf8(reference).ok()?.split('#').next()?;
        let target = match reference.split_once("://") {
            Some((_, rest)) => {
                let path = rest.find('/')?;
                same_host(&rest[..path], self.host()).then_some(&rest[path..])?
            }
            None => reference,
        };
        let origin = &self.text[self.ends.1..];
        (target.starts_with('/') && !target.starts_with("//")).then(|| [self.host(), target, origin].concat())
    }
}

/// Returns the values of a field that a backend gets, combined. Spaces around commas mean nothing.
pub(crate) fn combined(request: &Request<'_, '_>, name: &str) -> Vec<u8> {
    let values = request.forwarded_values(name);
    let parts = values.flat_map(|value| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii);
    parts.collect::<Vec<_>>().join(&b", "[..])
}
