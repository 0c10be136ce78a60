//! The keys of stored replies, and the values of the fields that replies depend on.

use crate::message::Request;
use crate::message::target::same_host;

/// The key of a target: its host, in one form, the target, and what trusted proxies say of the request
/// that they got.
#[derive(Debug)]
pub(crate) struct Key {
    host: String,
    target: String,
    origin: String,
}

impl Key {
    /// Returns the key of a request. `trusts_client` means that a backend gets what the client says of its origin.
    pub(crate) fn of(request: &Request<'_, '_>, trusts_client: bool) -> Key {
        let host = request.host.unwrap_or("localhost").to_ascii_lowercase();
        let host = host.strip_suffix(":80").or_else(|| host.strip_suffix(':')).unwrap_or(&host).to_owned();
        let mut target = Vec::new();
        request.target.write(&mut target);
        let mut origin = String::new();
        if trusts_client {
            let mut add = |name: &str, value: &[u8]| {
                origin += &format!("\n{name}={}", value.trim_ascii().escape_ascii())
            };
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
        Key { host, target: String::from_utf8_lossy(&target).into_owned(), origin }
    }

    /// Returns the key as a text.
    pub(crate) fn text(&self) -> String {
        self.with(&self.target)
    }

    fn with(&self, target: &str) -> String {
        format!("{}{target}{}", self.host, self.origin)
    }

    /// Returns the key of a reference in a reply, if its host is the same.
    pub(crate) fn referred(&self, reference: &[u8]) -> Option<String> {
        let reference = std::str::from_utf8(reference).ok()?.split('#').next()?;
        let target = match reference.split_once("://") {
            Some((_, rest)) => {
                let path = rest.find('/')?;
                same_host(&rest[..path], &self.host).then_some(&rest[path..])?
            }
            None => reference,
        };
        (target.starts_with('/') && !target.starts_with("//")).then(|| self.with(target))
    }
}

/// Returns the values of a field that a backend gets, combined. Spaces around commas mean nothing.
pub(crate) fn combined(request: &Request<'_, '_>, name: &str) -> Vec<u8> {
    let values = request.forwarded_values(name);
    let parts = values.flat_map(|value| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii);
    parts.collect::<Vec<_>>().join(&b", "[..])
}
