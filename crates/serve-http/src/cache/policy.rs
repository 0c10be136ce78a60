//! Which requests and replies concern the cache, and how long a reply is fresh (RFC 9111).

use std::time::{Duration, SystemTime};

use super::directives::{Directives, list, seconds};
use crate::message::fields::Name;
use crate::message::{Reply, Request};

/// How a request may use the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It goes to the backend, and its reply is not stored.
    Pass,
    /// As [`Use::Pass`], and a reply that is no error makes the stored ones for its target useless.
    Change,
    /// It is answered by a stored reply, if that is fresh enough; else its reply may be stored.
    Look(Asked),
}

/// What a request demands of a stored reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// It asks for the head only. Its own reply is not stored.
    pub is_head: bool,
    /// It has an Authorization.
    pub is_authorized: bool,
    /// It has a Cookie.
    pub has_cookie: bool,
    /// It asks for a part. Its own reply is not stored.
    pub has_range: bool,
    /// A stored reply must be validated first (`no-cache`), so it is not used.
    pub refetches: bool,
    /// The largest age of a reply, in seconds.
    pub max_age: Option<u64>,
    /// For how long a reply must remain fresh, in seconds.
    pub min_fresh: u64,
    /// It is not to be forwarded (`only-if-cached`).
    pub only_if_cached: bool,
    /// Its own reply may be a 304, which is not stored.
    pub is_conditional: bool,
}

/// Returns how a request may use the cache.
pub fn of_request(request: &Request<'_, '_>, has_body: bool) -> Use {
    match request.method {
        "GET" | "HEAD" => {}
        "OPTIONS" => return Use::Pass,
        _ => return Use::Change,
    }
    // Preconditions of changes are for the backend. The others change the meaning of a request for
    // many backends, and are not part of the key: what such a request gets is for itself.
    const OTHERS: [&str; 11] = [
        "if-match",
        "if-unmodified-since",
        "x-forwarded-port",
        "x-forwarded-prefix",
        "x-forwarded-scheme",
        "x-forwarded-server",
        "x-host",
        "x-http-method-override",
        "x-method-override",
        "x-original-url",
        "x-rewrite-url",
    ];
    if has_body || request.upgrade.is_some() || OTHERS.iter().any(|name| request.field(name).is_some()) {
        return Use::Pass;
    }
    let directives = Directives::read(request.values("cache-control"));
    if directives.no_store {
        return Use::Pass;
    }
    let has_control = request.field("cache-control").is_some();
    let pragma = !has_control
        && request
            .values("pragma")
            .any(|value| list(value).iter().any(|one| one.eq_ignore_ascii_case(b"no-cache")));
    Use::Look(Asked {
        is_head: request.method == "HEAD",
        is_authorized: request.field("authorization").is_some(),
        has_cookie: request.field("cookie").is_some(),
        has_range: request.method == "GET"
            && ["range", "if-range"].iter().any(|name| request.field(name).is_some()),
        refetches: directives.no_cache || pragma,
        max_age: directives.max_age,
        min_fresh: directives.min_fresh,
        only_if_cached: directives.only_if_cached,
        is_conditional: ["if-none-match", "if-modified-since"]
            .iter()
            .any(|name| request.field(name).is_some()),
    })
}

/// How a reply may be used from the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storable {
    /// For how long it is fresh. Not at all if each use needs a validation.
    pub lifetime: Duration,
    /// Its age when it arrived.
    pub age: Duration,
    /// It may answer requests with an Authorization.
    pub is_for_authorized: bool,
    /// It may answer requests with a Cookie.
    pub is_for_cookies: bool,
    /// A backend can say whether it is still right.
    pub can_be_validated: bool,
    /// The names in Vary, in small letters.
    pub vary: Vec<String>,
    /// It has no Date, so the time of its arrival is added.
    pub lacks_date: bool,
}

/// Statuses that are stored. Of the second list, only those with an explicit lifetime.
const DEFAULT: [u16; 11] = [200, 203, 204, 300, 301, 308, 404, 405, 410, 414, 501];
const EXPLICIT: [u16; 3] = [302, 303, 307];

/// Returns how a reply may be used, or `None` if it must not be stored. `waited` is the time since the
/// request was sent, and `default` the lifetime of replies that have none.
pub fn of_reply(
    reply: &Reply<'_, '_>,
    asked: &Asked,
    now: SystemTime,
    waited: Duration,
    default: Duration,
) -> Option<Storable> {
    let (mut directives, is_targeted) = Directives::of_reply(reply);
    // All statuses that are stored are understood (RFC 9111, section 5.2.2.3).
    directives.no_store &= !directives.must_understand;
    let (is_default, is_explicit) = (DEFAULT.contains(&reply.status), EXPLICIT.contains(&reply.status));
    if !(is_default || is_explicit) || directives.no_store || directives.private {
        return None;
    }
    let is_for_authorized =
        directives.public || directives.must_revalidate || directives.shared_max_age.is_some();
    if asked.is_authorized && !is_for_authorized || reply.values("set-cookie").next().is_some() {
        return None;
    }
    let mut vary = Vec::new();
    for name in reply.values("vary").flat_map(list) {
        let name = std::str::from_utf8(name).ok()?.to_ascii_lowercase();
        // A backend sees other values of these than the client has sent.
        if name == "*" || Name::of(&name).differs_behind_proxy() {
            return None;
        }
        vary.push(name);
    }
    let date = reply.values("date").next().and_then(read_date);
    // Of several ages the first one counts, and none that cannot be read (RFC 9111, section 5.1).
    let age = reply.values("age").flat_map(list).next().and_then(seconds).unwrap_or(0);
    // Dates have whole seconds. With a fraction here, a lifetime of a second would be shorter by it.
    let apparent = date.and_then(|date| now.duration_since(date).ok()).unwrap_or_default().as_secs();
    let age = Duration::from_secs(apparent).max(Duration::from_secs(age) + waited);
    let explicit = directives.shared_max_age.or(directives.max_age).map(Duration::from_secs);
    let expires = reply.values("expires").next().filter(|_| !is_targeted);
    let lifetime = match (explicit, expires) {
        _ if directives.no_cache => Duration::ZERO,
        (Some(lifetime), _) => lifetime,
        // A date that cannot be read is in the past.
        (None, Some(expires)) => read_date(expires)
            .and_then(|expires| expires.duration_since(date.unwrap_or(now)).ok())
            .unwrap_or_default(),
        (None, None) if is_default => default,
        (None, None) => return None,
    };
    // Replies to cookies often depend on them without a Vary. The backend has to show that it knows.
    let is_for_cookies = explicit.is_some()
        || expires.is_some()
        || directives.public
        || directives.must_revalidate
        || directives.no_cache
        || !default.is_zero();
    let can_be_validated = reply.status == 200
        && (reply.values("etag").next().is_some()
            || reply.values("last-modified").next().and_then(read_date).is_some());
    let is_useful = lifetime > age || can_be_validated;
    (is_useful && (is_for_cookies || !asked.has_cookie)).then_some(Storable {
        lifetime,
        age,
        is_for_authorized,
        is_for_cookies,
        can_be_validated,
        vary,
        lacks_date: date.is_none(),
    })
}

/// Reads a date of HTTP, in any of its three forms, with letters of either case.
pub fn read_date(value: &[u8]) -> Option<SystemTime> {
    let text = std::str::from_utf8(value).ok()?.trim();
    httpdate::parse_http_date(text).ok().or_else(|| {
        let (mut usual, mut is_first) = (String::with_capacity(text.len()), true);
        for letter in text.chars() {
            usual.push(if is_first { letter.to_ascii_uppercase() } else { letter.to_ascii_lowercase() });
            is_first = !letter.is_ascii_alphabetic();
        }
        httpdate::parse_http_date(&usual.replace("Gmt", "GMT")).ok()
    })
}

/// Returns true if two entity tags are the same in the weak comparison (RFC 9110, section 8.8.3.2).
pub(super) fn is_same_tag(one: &[u8], other: &[u8]) -> bool {
    let opaque = |tag| <[u8]>::strip_prefix(tag, b"W/").unwrap_or(tag).to_vec();
    opaque(one) == opaque(other)
}

/// Returns true if the request's preconditions show that its client has this representation already
/// (RFC 9110, section 13.2.2).
pub fn is_not_modified(request: &Request<'_, '_>, etag: Option<&[u8]>, modified: Option<SystemTime>) -> bool {
    let mut wanted = request.values("if-none-match").peekable();
    if wanted.peek().is_some() {
        return wanted
            .flat_map(list)
            .any(|one| one == b"*" || etag.is_some_and(|etag| is_same_tag(one, etag)));
    }
    let since = request.field("if-modified-since").and_then(read_date);
    since.zip(modified).is_some_and(|(since, modified)| modified <= since)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::reply::parse as parse_reply;
    use crate::message::request::parse as parse_request;
    use crate::message::{Parsed, no_fields};

    fn asked(fields: &str) -> Use {
        let bytes = format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        let mut slots = no_fields();
        let Ok(Parsed::Complete(request)) = parse_request(bytes.as_bytes(), &mut slots, 4096) else {
            panic!("{fields}")
        };
        of_request(&request, false)
    }

    /// 784111777 s after the beginning of 1970.
    const NOW: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn lifetime_for(asked: Asked, status: u16, fields: &str) -> Option<(u64, u64)> {
        let bytes = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n{fields}\r\n");
        let mut slots = no_fields();
        let reply = parse_reply(bytes.as_bytes(), &mut slots, 4096, false);
        let Ok(Parsed::Complete(reply)) = reply else { panic!("{fields}") };
        let now = read_date(NOW.as_bytes()).unwrap();
        let storable = of_reply(&reply, &asked, now, Duration::ZERO, Duration::from_secs(7))?;
        Some((storable.lifetime.as_secs(), storable.age.as_secs()))
    }

    fn lifetime(fields: &str) -> Option<u64> {
        lifetime_for(Asked::default(), 200, fields).map(|(lifetime, _)| lifetime)
    }

    #[test]
    fn a_lifetime_is_the_most_specific_one() {
        for (fields, expected) in [
            ("", Some(7)),
            ("Cache-Control: max-age=100\r\n", Some(100)),
            ("Cache-Control: max-age=\"100\"\r\n", Some(100)),
            ("cache-control: MAX-AGE=100 , public\r\n", Some(100)),
            ("Cache-Control: max-age=100, s-maxage=10\r\n", Some(10)),
            ("Cache-Control: s-maxage=10\r\nCache-Control: max-age=100\r\n", Some(10)),
            ("Cache-Control: max-age=99999999999999999999\r\n", Some(1 << 31)),
            // Two of them, or one that is no number: stale.
            ("Cache-Control: max-age=100, max-age=1\r\n", Some(1)),
            ("Cache-Control: max-age=100, max-age=x\r\n", None),
            ("Cache-Control: max-age=-1\r\n", None),
            ("Cache-Control: max-age\r\n", None),
            ("Cache-Control: max-age=0\r\nExpires: Sun, 06 Nov 1994 09:49:37 GMT\r\n", None),
            ("Expires: Sun, 06 Nov 1994 08:50:37 GMT\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n", Some(60)),
            ("Expires: Sunday, 06-Nov-94 08:50:37 GMT\r\n", Some(60)),
            ("Expires: Sun Nov  6 08:50:37 1994\r\n", Some(60)),
            ("Expires: 0\r\n", None),
            ("Expires: Sun, 06 Nov 1994 08:49:37 GMT\r\n", None),
        ] {
            assert_eq!(lifetime(fields), expected, "{fields}");
        }
    }

    #[test]
    fn what_must_not_be_stored_is_not() {
        for fields in [
            "Cache-Control: no-store, max-age=100\r\n",
            "Cache-Control: private, max-age=100\r\n",
            "Cache-Control: private=\"set-cookie, x\", max-age=100\r\n",
            "Cache-Control: no-cache\r\n",
            "Cache-Control: x=\"a, max-age=5\", no-store\r\n",
            "Cache-Control: max-age=100\r\nSet-Cookie: a=b\r\n",
            "Cache-Control: max-age=100\r\nVary: accept, *\r\n",
            "Cache-Control: max-age=100\r\nVary: X-Forwarded-For\r\n",
            "Cache-Control: max-age=100\r\nVary: accept, via\r\n",
            "Cache-Control: max-age=100\r\nAge: 100\r\n",
            "Cache-Control: max-age=100\r\nAge: 100, 0\r\n",
            "Cache-Control: max-age=100\r\nCDN-Cache-Control: no-store\r\n",
            "Cache-Control: max-age=100\r\nCDN-Cache-Control: private\r\n",
        ] {
            assert_eq!(lifetime(fields), None, "{fields}");
        }
        // In a quoted string, nothing is a directive.
        assert_eq!(lifetime("Cache-Control: x=\"no-store, private\", max-age=5\r\n"), Some(5));
        for fields in [
            "Cache-Control: max-age=5\r\nAge: x\r\n",
            "Cache-Control: max-age=5\r\nAge: 0, 100\r\n",
            "Cache-Control: max-age=5\r\nVary: X-Forwarded-Proto, Host\r\n",
            "Cache-Control: no-store, must-understand, max-age=5\r\n",
            "Cache-Control: no-store\r\nCDN-Cache-Control: max-age=5\r\nExpires: 0\r\n",
        ] {
            assert_eq!(lifetime(fields), Some(5), "{fields}");
        }
    }

    #[test]
    fn what_can_be_validated_is_stored_without_a_lifetime() {
        let tag = "ETag: \"a\"\r\n";
        for (fields, is_stored) in [
            ("Cache-Control: no-cache\r\n", false),
            (&format!("Cache-Control: no-cache\r\n{tag}"), true),
            (&format!("Cache-Control: max-age=0\r\n{tag}"), true),
            (&format!("Expires: 0\r\n{tag}"), true),
            ("Cache-Control: no-cache\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", true),
            ("Cache-Control: no-cache\r\nLast-Modified: yesterday\r\n", false),
            (&format!("Cache-Control: no-store\r\n{tag}"), false),
            (&format!("Cache-Control: private, no-cache\r\n{tag}"), false),
        ] {
            assert_eq!(lifetime(fields).is_some(), is_stored, "{fields}");
        }
        assert_eq!(lifetime(&format!("Cache-Control: max-age=100, no-cache\r\n{tag}")), Some(0));
        // Only what says that it may be shared is shared among those that have cookies.
        let cookie = Asked { has_cookie: true, ..Asked::default() };
        let stored = |fields: &str| {
            let bytes = format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{fields}\r\n");
            let mut slots = no_fields();
            let Ok(Parsed::Complete(reply)) = parse_reply(bytes.as_bytes(), &mut slots, 4096, false) else {
                panic!("{fields}")
            };
            of_reply(&reply, &cookie, SystemTime::now(), Duration::ZERO, Duration::ZERO).is_some()
        };
        assert!(!stored(tag) && stored(&format!("Cache-Control: max-age=0\r\n{tag}")));
    }

    #[test]
    fn a_fraction_of_a_second_makes_no_reply_older() {
        let bytes = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nCache-Control: max-age=1\r\nDate: {NOW}\r\n\r\n"
        );
        let mut slots = no_fields();
        let reply = parse_reply(bytes.as_bytes(), &mut slots, 4096, false);
        let Ok(Parsed::Complete(reply)) = reply else { panic!() };
        let now = read_date(NOW.as_bytes()).unwrap() + Duration::from_millis(900);
        let storable = of_reply(&reply, &Asked::default(), now, Duration::ZERO, Duration::ZERO);
        assert_eq!(storable.map(|it| it.age), Some(Duration::ZERO));
    }

    #[test]
    fn dates_have_three_forms_and_letters_of_either_case() {
        let expected = read_date(NOW.as_bytes());
        assert!(expected.is_some());
        for date in [
            "sun, 06 NOV 1994 08:49:37 gmt",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "SUNDAY, 06-nov-94 08:49:37 Gmt",
            "Sun Nov  6 08:49:37 1994",
        ] {
            assert_eq!(read_date(date.as_bytes()), expected, "{date}");
        }
        for date in ["Mon Nov  6 08:49:37 1994", "Sun, 06 Nov 1994 08:49:37", "0", ""] {
            assert_eq!(read_date(date.as_bytes()), None, "{date}");
        }
    }

    #[test]
    fn the_status_decides_too() {
        let plain = |status| lifetime_for(Asked::default(), status, "").is_some();
        let with_age =
            |status| lifetime_for(Asked::default(), status, "Cache-Control: max-age=9\r\n").is_some();
        for (status, heuristic, explicit) in [
            (200, true, true),
            (204, true, true),
            (206, false, false),
            (301, true, true),
            (302, false, true),
            (303, false, true),
            (304, false, false),
            (400, false, false),
            (404, true, true),
            (410, true, true),
            (500, false, false),
            (503, false, false),
        ] {
            assert_eq!((plain(status), with_age(status)), (heuristic, explicit), "{status}");
        }
    }

    #[test]
    fn an_age_is_that_of_the_date_or_of_other_caches() {
        let age = |fields: &str| {
            lifetime_for(Asked::default(), 200, &format!("Cache-Control: max-age=1000\r\n{fields}"))
                .unwrap()
                .1
        };
        assert_eq!(age("Date: Sun, 06 Nov 1994 08:49:00 GMT\r\n"), 37);
        assert_eq!(age("Date: Sun, 06 Nov 1994 08:49:00 GMT\r\nAge: 50\r\n"), 50);
        assert_eq!(age("Date: Sun, 06 Nov 1994 09:49:00 GMT\r\nAge: 5\r\n"), 5);
    }

    #[test]
    fn replies_to_authorized_requests_need_a_permission() {
        let authorized = Asked { is_authorized: true, ..Asked::default() };
        for (fields, is_stored) in [
            ("Cache-Control: max-age=100\r\n", false),
            ("Cache-Control: max-age=100, public\r\n", true),
            ("Cache-Control: max-age=100, must-revalidate\r\n", true),
            ("Cache-Control: s-maxage=100\r\n", true),
            ("", false),
        ] {
            assert_eq!(lifetime_for(authorized, 200, fields).is_some(), is_stored, "{fields}");
        }
    }

    #[test]
    fn requests_say_what_they_take() {
        let look = |fields: &str| match asked(fields) {
            Use::Look(asked) => asked,
            other => panic!("{fields}: {other:?}"),
        };
        assert_eq!(look(""), Asked::default());
        assert_eq!(look("Cache-Control: max-age=5, min-fresh=3\r\n").max_age, Some(5));
        assert_eq!(look("Cache-Control: max-age=5, min-fresh=3\r\n").min_fresh, 3);
        assert!(look("Cache-Control: no-cache\r\n").refetches);
        assert!(look("Pragma: no-cache\r\n").refetches);
        assert!(!look("Pragma: no-cache\r\nCache-Control: max-age=5\r\n").refetches);
        assert!(look("Cache-Control: only-if-cached\r\n").only_if_cached);
        assert!(look("Authorization: Basic x\r\n").is_authorized);
        assert!(look("Range: bytes=0-1\r\n").has_range && look("Cookie: a=b\r\n").has_cookie);
        for fields in [
            "Cache-Control: no-store\r\n",
            "X-HTTP-Method-Override: DELETE\r\n",
            "X-Original-URL: /other\r\n",
            "If-Match: \"a\"\r\n",
            "If-Unmodified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n",
        ] {
            assert_eq!(asked(fields), Use::Pass, "{fields}");
        }
    }

    #[test]
    fn a_client_that_has_it_gets_no_body() {
        let check = |fields: &str, etag: Option<&str>, modified: Option<&str>| {
            let bytes = format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
            let mut slots = no_fields();
            let Ok(Parsed::Complete(request)) = parse_request(bytes.as_bytes(), &mut slots, 4096) else {
                panic!("{fields}")
            };
            let modified = modified.and_then(|date| read_date(date.as_bytes()));
            is_not_modified(&request, etag.map(str::as_bytes), modified)
        };
        let since = format!("If-Modified-Since: {NOW}\r\n");
        assert!(check("If-None-Match: \"a\"\r\n", Some("\"a\""), None));
        assert!(check("If-None-Match: \"b\", W/\"a\"\r\n", Some("\"a\""), None));
        assert!(check("If-None-Match: \"a\"\r\n", Some("W/\"a\""), None));
        assert!(check("If-None-Match: *\r\n", None, None));
        assert!(check("If-None-Match: \"b\"\r\nIf-None-Match: \"a,c\"\r\n", Some("\"a,c\""), None));
        assert!(!check("If-None-Match: \"b\"\r\n", Some("\"a\""), None));
        assert!(!check("If-None-Match: \"a\"\r\n", None, None));
        // The tags take precedence over the date.
        assert!(!check(&format!("If-None-Match: \"b\"\r\n{since}"), Some("\"a\""), Some(NOW)));
        assert!(check(&since, None, Some(NOW)) && check(&since, None, Some("Sun, 06 Nov 1994 08:00:00 GMT")));
        assert!(!check(&since, None, Some("Sun, 06 Nov 1994 08:49:38 GMT")) && !check(&since, None, None));
        assert!(!check("If-Modified-Since: yesterday\r\n", None, Some(NOW)));
    }
}
