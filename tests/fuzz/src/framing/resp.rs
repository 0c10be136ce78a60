//! A parser for RESP, the protocol of Redis.

use shunt_serve::service::{Key, Refusal};

use super::{Decision, MALFORMED, MAX_LENGTH, Stop, TOO_COMPLEX, TOO_LONG, number_line};

/// RESP_PARTS in resp.h.
const PARTS: usize = 16384;
/// RESP_LINE in resp.h.
const LINE: usize = 1024;

/// Parses a header such as "$5": its type, its number, and the end of its line.
fn header(bytes: &[u8], at: usize) -> Result<(u8, usize, usize), Stop> {
    let kind = *bytes.get(at).ok_or(Stop::More)?;
    let (number, rest) = number_line(&bytes[at + 1..])?;
    Ok((kind, number, bytes.len() - rest.len()))
}

pub(super) fn command(bytes: &[u8]) -> Result<usize, Stop> {
    if bytes.first().is_some_and(|first| *first != b'*') {
        return match bytes.iter().take(LINE).position(|byte| *byte == b'\n') {
            Some(end) => Ok(end + 1),
            None if bytes.len() >= LINE => Err(MALFORMED),
            None => Err(Stop::More),
        };
    }
    let (_, count, mut at) = header(bytes, 0)?;
    match count {
        0 => return Err(MALFORMED),
        1..=PARTS => {}
        _ => return Err(TOO_COMPLEX),
    }
    for _ in 0..count {
        if bytes.get(at).is_some_and(|kind| *kind != b'$') {
            return Err(MALFORMED);
        }
        let (_, length, begin) = header(bytes, at)?;
        at = begin + length + 2;
        if at > MAX_LENGTH {
            return Err(TOO_LONG);
        }
    }
    Ok(at)
}

pub(super) fn reply(bytes: &[u8]) -> Result<usize, Stop> {
    value(bytes, 0)
}

/// Returns the end of the value that begins at `at`.
fn value(bytes: &[u8], at: usize) -> Result<usize, Stop> {
    // Nesting has no limit, so the loop counts the values that remain.
    let (mut at, mut left) = (at, 1_usize);
    while left > 0 {
        let kind = *bytes.get(at).ok_or(Stop::More)?;
        let null = b"$!=*~%|".contains(&kind) && bytes.get(at + 1) == Some(&b'-');
        left -= 1;
        if b"+-:_#,(".contains(&kind) || null {
            let line = &bytes[at..];
            match line.iter().take(65536).position(|byte| *byte == b'\n') {
                Some(end) => at += end + 1,
                None if line.len() >= 65536 => return Err(TOO_LONG),
                None => return Err(Stop::More),
            }
        } else if b"$!=".contains(&kind) {
            let (_, length, begin) = header(bytes, at)?;
            at = begin + length + 2;
        } else {
            let factor = match kind {
                b'*' | b'~' => 1,
                b'%' | b'|' => 2,
                _ => return Err(MALFORMED),
            };
            let (_, count, begin) = header(bytes, at)?;
            // An attribute is followed by the value that it describes.
            left += factor * count + usize::from(kind == b'|');
            at = begin;
        }
        if at > MAX_LENGTH || left > MAX_LENGTH {
            return Err(TOO_LONG);
        }
    }
    Ok(at)
}

pub(super) fn decide(message: &[u8]) -> Decision {
    if message[0] != b'*' {
        let text = message.strip_suffix(b"\n").expect("a line");
        return match name(text.strip_suffix(b"\r").unwrap_or(text)).as_deref() {
            Some("PING" | "QUIT") => Decision::Own,
            _ if text.is_empty() || text == b"\r" => Decision::Own,
            _ => Decision::Refuse(Refusal::UnknownCommand),
        };
    }
    let (_, count, mut at) = header(message, 0).expect("a command");
    let (mut arguments, mut raw) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (_, length, begin) = header(message, at).expect("an argument");
        arguments.push(begin..begin + length);
        raw.push(&message[at..begin + length + 2]);
        at = begin + length + 2;
    }
    let Some(name) = name(&message[arguments[0].clone()]) else {
        return Decision::Refuse(Refusal::UnknownCommand);
    };
    // Each part repeats the command, with `size` of the arguments.
    let split = |size: usize| {
        let name = &message[arguments[0].clone()];
        let begin = [format!("*{}\r\n${}\r\n", size + 1, name.len()).as_bytes(), name, b"\r\n"].concat();
        Decision::Split(raw[1..].chunks(size).map(|raw| [&begin[..], &raw.concat()].concat()).collect())
    };
    let one = match (name.as_str(), count) {
        ("PING", 1) | ("QUIT", _) => return Decision::Own,
        (name, 2..) if ONE_KEY.split_whitespace().any(|one| one == name) => true,
        ("DEL" | "EXISTS" | "UNLINK" | "TOUCH" | "MGET" | "PFCOUNT", 2) | ("MSET", 3) => true,
        ("DEL" | "EXISTS" | "UNLINK" | "TOUCH" | "MGET", _) if count > 2 => return split(1),
        ("MSET", 5..) if count % 2 == 1 => return split(2),
        _ => false,
    };
    match one {
        true => forward(message, arguments[1].clone()),
        false => Decision::Refuse(Refusal::UnknownCommand),
    }
}

/// Returns a name in capitals. The C code changes the case of other characters too, but no command
/// has any.
fn name(bytes: &[u8]) -> Option<String> {
    let mut name: Vec<u8> = bytes.iter().map(|byte| byte & !0x20).collect();
    while name.last() == Some(&0) {
        name.pop();
    }
    (bytes.len() <= 16).then(|| String::from_utf8_lossy(&name).into_owned())
}

fn forward(message: &[u8], key: std::ops::Range<usize>) -> Decision {
    let text = &message[key.clone()];
    if let Some(open) = text.iter().position(|byte| *byte == b'{')
        && let Some(close) = text[open..].iter().position(|byte| *byte == b'}')
        && close > 1
    {
        return Decision::Forward(Key::Bytes(key.start + open + 1..key.start + open + close), false);
    }
    Decision::Forward(Key::Bytes(key), false)
}

const ONE_KEY: &str = "GET SET INCR DECR INCRBY DECRBY APPEND SETEX SETNX PSETEX GETSET GETDEL GETEX STRLEN GETRANGE
    SETRANGE INCRBYFLOAT GETBIT SETBIT BITCOUNT BITPOS EXPIRE EXPIREAT PEXPIRE PEXPIREAT TTL PTTL PERSIST TYPE DUMP RESTORE
    HGET HSET HSETNX HMGET HMSET HDEL HLEN HKEYS HVALS HGETALL HEXISTS HINCRBY HINCRBYFLOAT HSTRLEN HSCAN LPUSH RPUSH
    LPUSHX RPUSHX LPOP RPOP LLEN LINDEX LINSERT LRANGE LREM LSET LTRIM LPOS SADD SREM SCARD SISMEMBER SMISMEMBER SMEMBERS
    SPOP SRANDMEMBER SSCAN ZADD ZREM ZCARD ZCOUNT ZINCRBY ZRANGE ZREVRANGE ZRANGEBYSCORE ZRANK ZREVRANK ZSCORE ZMSCORE
    ZPOPMIN ZPOPMAX ZSCAN XADD XLEN XRANGE XDEL PFADD GEOADD GEOPOS GEODIST";
