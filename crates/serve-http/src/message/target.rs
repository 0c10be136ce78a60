//! The target and the host of a request (RFC 9112, section 3.2): which forms are accepted, and
//! the path that a route is chosen by.

use std::borrow::Cow;

use super::request::Refusal;

/// The target of a request as it is forwarded, in origin-form or `*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    /// The authority of the absolute-form, which has to match the field Host.
    pub authority: Option<&'a str>,
    /// The path and query. It may be empty, or begin with `?`, in the absolute-form only.
    pub path: &'a str,
}

impl<'a> Target<'a> {
    /// Parses a target that httparse has accepted: it has no spaces and no control characters.
    pub fn parse(target: &'a str, method: &str) -> Result<Target<'a>, Refusal> {
        if !target.is_ascii() || target.contains('#') {
            return Err(Refusal::Target);
        }
        if target.starts_with('/') {
            return Ok(Target { authority: None, path: target });
        }
        if target == "*" {
            let is_options = method == "OPTIONS";
            return if is_options {
                Ok(Target { authority: None, path: target })
            } else {
                Err(Refusal::Target)
            };
        }
        let scheme = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"));
        scheme.ok_or(Refusal::Target)?;
        let rest = &target[7..];
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        if !is_host(authority) {
            return Err(Refusal::Target);
        }
        let path = if path.is_empty() && method == "OPTIONS" { "*" } else { path };
        Ok(Target { authority: Some(authority), path })
    }

    /// Appends the target as a backend gets it.
    pub fn write(&self, out: &mut Vec<u8>) {
        self.parts().iter().for_each(|part| out.extend_from_slice(part.as_bytes()));
    }

    /// Returns the parts of the target as a backend gets it.
    pub(crate) fn parts(&self) -> [&'a str; 2] {
        let lacks_path = self.path.is_empty() || self.path.starts_with('?');
        [if lacks_path { "/" } else { "" }, self.path]
    }

    /// Returns the path that a route is chosen by, or `None` if it leaves the root.
    pub fn route_path(&self) -> Option<Cow<'a, str>> {
        let path = self.path.split('?').next().unwrap_or_default();
        if path.is_empty() || path == "*" { Some(Cow::Borrowed("/")) } else { normal(path) }
    }
}

/// Returns a path with its dot segments removed and its escaped unreserved characters decoded, as
/// a backend may read it. So `/a/%2e%2e/b` has the route of `/b`.
fn normal(path: &str) -> Option<Cow<'_, str>> {
    if !path.contains('%') && !path.contains("/.") && !path.contains("//") && !path.contains('\\') {
        return Some(Cow::Borrowed(path));
    }
    let mut segments: Vec<String> = Vec::new();
    let decoded = decode(path);
    let mut parts = decoded.split(['/', '\\']).skip(1).peekable();
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        match part {
            ".." => {
                segments.pop()?;
                if is_last {
                    segments.push(String::new());
                }
            }
            "." | "" if !is_last => {}
            "." => segments.push(String::new()),
            part => segments.push(part.to_owned()),
        }
    }
    Some(Cow::Owned(format!("/{}", segments.join("/"))))
}

/// Decodes what no separator of a path can be mistaken for, and separators too: a backend that
/// decodes before it chooses sees them.
fn decode(path: &str) -> String {
    let bytes = path.as_bytes();
    let (mut out, mut at) = (String::with_capacity(path.len()), 0);
    while at < bytes.len() {
        let digit = |at: usize| bytes.get(at).and_then(|byte| (*byte as char).to_digit(16));
        let escaped = (bytes[at] == b'%').then(|| Some(digit(at + 1)? * 16 + digit(at + 2)?)).flatten();
        match escaped.and_then(char::from_u32).filter(char::is_ascii_graphic) {
            Some(char) if char != '%' => {
                out.push(char);
                at += 3;
            }
            _ => {
                out.push(bytes[at] as char);
                at += 1;
            }
        }
    }
    out
}

/// Returns true if this is a host with an optional port: a name, an IPv4 address, or an IPv6
/// address in brackets.
pub fn is_host(value: &str) -> bool {
    let (name, port) = match value.strip_prefix('[') {
        Some(rest) => {
            let Some((address, port)) = rest.split_once(']') else { return false };
            let is_address = !address.is_empty()
                && address
                    .bytes()
                    .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F' | b':' | b'.'));
            (if is_address { "v6" } else { "" }, port.strip_prefix(':').or(port.is_empty().then_some("")))
        }
        None => match value.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (value, Some("")),
        },
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+;=%".contains(&byte);
    let Some(port) = port else { return false };
    !name.is_empty()
        && name.bytes().all(is_name)
        && port.len() <= 5
        && port.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns true if two hosts are equal, where no port means port 80.
pub fn same_host(one: &str, other: &str) -> bool {
    let plain = |host: &str| -> usize {
        let bare = host.strip_suffix(":80").or_else(|| host.strip_suffix(':')).unwrap_or(host);
        bare.len()
    };
    one[..plain(one)].eq_ignore_ascii_case(&other[..plain(other)])
}

/// Returns the name of a host, without its port.
pub fn host_name(host: &str) -> &str {
    let end = match host.strip_prefix('[') {
        Some(rest) => rest.find(']').map_or(host.len(), |at| at + 2),
        None => host.find(':').unwrap_or(host.len()),
    };
    &host[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(target: &str) -> Result<String, Refusal> {
        let target = Target::parse(target, "GET")?;
        let mut out = Vec::new();
        target.write(&mut out);
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn absolute_form_becomes_origin_form() {
        for (target, forwarded) in [
            ("/a?b", "/a?b"),
            ("http://h/a", "/a"),
            ("HTTP://h:80", "/"),
            ("http://h?q", "/?q"),
            ("http://[::1]:8080/x", "/x"),
        ] {
            assert_eq!(written(target).as_deref(), Ok(forwarded));
        }
        for target in
            ["a", "*", "https://h/", "http://", "http:///a", "http://u@h/", "/a#b", "h:80", "/\u{e9}"]
        {
            assert_eq!(written(target), Err(Refusal::Target), "{target}");
        }
    }

    #[test]
    fn path_of_route_is_what_a_backend_may_read() {
        let path = |path| Target { authority: None, path }.route_path();
        for (raw, route) in [
            ("/a/b?c=/../d", "/a/b"),
            ("/a/../b", "/b"),
            ("/a/%2e%2E/b", "/b"),
            ("/a/./b/", "/a/b/"),
            ("/a/..", "/"),
            ("/a//b", "/a/b"),
            ("/a%2fb", "/a/b"),
            ("/a\\..\\b", "/b"),
            ("/%61dmin", "/admin"),
            ("/a%zz%", "/a%zz%"),
            ("?q", "/"),
            ("*", "/"),
            ("/.x", "/.x"),
        ] {
            assert_eq!(path(raw).as_deref(), Some(route), "{raw}");
        }
        for raw in ["/..", "/a/../../b", "/%2e%2e/a"] {
            assert_eq!(path(raw), None, "{raw}");
        }
    }

    #[test]
    fn hosts_are_names_or_addresses_with_ports() {
        for host in ["a", "a.b-c:80", "127.0.0.1", "[::1]", "[::1]:80", "a:", "xn--a"] {
            assert!(is_host(host), "{host}");
        }
        for host in [
            "", ":80", "a b", "a/b", "u@a", "a:b", "[::1", "[::1]x", "[]", "a,b", "a:123456", "a:1:2",
            "\u{e9}",
        ] {
            assert!(!is_host(host), "{host}");
        }
        assert!(
            same_host("A.b:80", "a.B")
                && same_host("a:", "a")
                && !same_host("a:81", "a")
                && !same_host("a", "b")
        );
        assert_eq!((host_name("a:80"), host_name("[::1]:80"), host_name("a")), ("a", "[::1]", "a"));
    }
}
