//! Redis' protocol.

use shunt_serve::service::{Key, Refusal};

use super::{Decision, MALFORMED, MAX_LENGTH, Stop, TOO_COMPLEX, TOO_LONG, number_line};

/// RESP_PARTS in resp.h.
const PARTS: usize = 16384;

/// "$5" and its like: the type, the number, and where the line ends.
fn header(bytes: &[u8], at: usize) -> Result<(u8, usize, usize), Stop> {
    let kind = *bytes.get(at).ok_or(Stop::More)?;
    let (number, rest) = number_line(&bytes[at + 1..])?;
    Ok((kind, number, bytes.len() - rest.len()))
}

pub(super) fn command(bytes: &[u8]) -> Result<usize, Stop> {
    if bytes.first().is_some_and(|first| *first != b'*') {
        return Err(MALFORMED);
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

/// Where the value that begins there ends.
fn value(bytes: &[u8], at: usize) -> Result<usize, Stop> {
    // By a count of what is still to come, as nesting has no limit.
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
            // What attributes are of follows them.
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
    let (_, count, mut at) = header(message, 0).expect("a command");
    let mut arguments = Vec::new();
    for _ in 0..count {
        let (_, length, begin) = header(message, at).expect("an argument");
        arguments.push(begin..begin + length);
        at = begin + length + 2;
    }
    let mut name: Vec<u8> = message[arguments[0].clone()].to_vec();
    // The C code folds more than letters, which no command has.
    name.iter_mut().for_each(|byte| *byte &= !0x20);
    while name.last() == Some(&0) {
        name.pop();
    }
    if name.len() > 16 || arguments[0].len() > 16 {
        return Decision::Refuse(Refusal::UnknownCommand);
    }
    let name = String::from_utf8_lossy(&name).into_owned();
    match (name.as_str(), count) {
        ("PING", 1) | ("QUIT", _) => Decision::Own,
        (name, 2..) if ONE_KEY.split_whitespace().any(|one| one == name) => {
            forward(message, arguments[1].clone())
        }
        ("DEL" | "EXISTS" | "UNLINK" | "TOUCH" | "MGET" | "PFCOUNT", 2) => {
            forward(message, arguments[1].clone())
        }
        _ => Decision::Refuse(Refusal::UnknownCommand),
    }
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
