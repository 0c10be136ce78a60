//! Which backend a key belongs to, as the clients of memcached choose it: shunt between them and their servers finds
//! every value where they have put it.

use md5::{Digest, Md5};

use crate::service::Key;

/// How keys are spread over backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// A number modulo the number of backends; of bytes, their one-at-a-time hash. What libmemcached does unless told
    /// otherwise. When backends come or go, nearly every key moves.
    Modulo,
    /// The continuum of libketama and of libmemcached's MEMCACHED_BEHAVIOR_KETAMA_WEIGHTED. When backends come or go,
    /// only their keys move. A number stands for its decimal digits.
    Ketama,
}

/// Points of a backend of average weight. Four are made of each digest.
const POINTS: u32 = 160;
/// A server at this port is known by its host alone.
const DEFAULT_PORT: &str = ":11211";

/// A point of the continuum, and whose the keys are from the point before up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// Compared with [`ketama`] of the key.
    pub value: u32,
    /// Counted from 0.
    pub backend: u32,
}

/// The backends, and whose each key is.
#[derive(Clone, Debug)]
pub struct Placement {
    scheme: Scheme,
    backends: usize,
    points: Vec<Point>,
}

impl Placement {
    /// Of backends with their weights, by HOST:PORT. A weight matters for the continuum only; 0 gets no keys there.
    pub fn new<'a>(scheme: Scheme, backends: impl IntoIterator<Item = (&'a str, u32)>) -> Placement {
        let backends: Vec<(&str, u32)> = backends.into_iter().collect();
        let mut points = Vec::new();
        if scheme == Scheme::Ketama {
            let total: u64 = backends.iter().map(|(_, weight)| u64::from(*weight)).sum();
            for (backend, (address, weight)) in (0..).zip(&backends) {
                let name = address.strip_suffix(DEFAULT_PORT).unwrap_or(address);
                for digest in 0..digests(*weight, total, backends.len()) {
                    let digest = Md5::digest(format!("{name}-{digest}"));
                    for bytes in digest.as_chunks::<4>().0 {
                        points.push(Point { value: u32::from_le_bytes(*bytes), backend });
                    }
                }
            }
            points.sort_unstable();
        }
        Placement { scheme, backends: backends.len(), points }
    }

    /// Counted from 0. None if there is none, or if a service has chosen one that does not exist.
    pub fn backend(&self, message: &[u8], key: &Key) -> Option<usize> {
        let among = |number: u64| number.checked_rem(self.backends as u64).map(|backend| backend as usize);
        match (self.scheme, key) {
            (_, Key::Backend(number)) => {
                usize::try_from(*number).ok().filter(|number| *number < self.backends)
            }
            (Scheme::Modulo, Key::Number(number)) => among(*number),
            (Scheme::Modulo, Key::Bytes(range)) => {
                among(u64::from(one_at_a_time(message.get(range.clone())?)))
            }
            (Scheme::Ketama, Key::Number(number)) => self.nearest(ketama(number.to_string().as_bytes())),
            (Scheme::Ketama, Key::Bytes(range)) => self.nearest(ketama(message.get(range.clone())?)),
        }
    }

    /// The continuum, in order; empty for [`Scheme::Modulo`].
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The first point at or after the value; after the last comes the first.
    fn nearest(&self, value: u32) -> Option<usize> {
        let after = self.points.partition_point(|point| point.value < value);
        let point = self.points.get(after).or(self.points.first())?;
        Some(point.backend as usize)
    }
}

/// In single precision, as everybody's is: the last digest of a weight depends on it.
fn digests(weight: u32, total: u64, backends: usize) -> u32 {
    if total == 0 {
        return 0;
    }
    let share = weight as f32 / total as f32;
    let digests = share * POINTS as f32 / 4.0 * backends as f32;
    (f64::from(digests) + 0.000_000_000_1).floor() as u32
}

/// The first four bytes of MD5. shunt_hash_bytes in hash.h has it too.
pub fn ketama(key: &[u8]) -> u32 {
    let digest = Md5::digest(key);
    u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]])
}

/// Jenkins' hash as libmemcached computes it, where bytes are signed. shunt_hash_bytes in hash.h has it too.
pub fn one_at_a_time(key: &[u8]) -> u32 {
    let mut value = 0_u32;
    for byte in key {
        value = value.wrapping_add(*byte as i8 as u32);
        value = value.wrapping_add(value << 10);
        value ^= value >> 6;
    }
    value = value.wrapping_add(value << 3);
    value ^= value >> 11;
    value.wrapping_add(value << 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(placement: &Placement, key: &str) -> Option<usize> {
        placement.backend(key.as_bytes(), &Key::Bytes(0..key.len()))
    }

    #[test]
    fn numbers_are_taken_modulo() {
        let placement = Placement::new(Scheme::Modulo, [("a:1", 1), ("b:1", 1), ("c:1", 1)]);
        assert_eq!(placement.backend(b"", &Key::Number(7)), Some(1));
        assert_eq!(placement.backend(b"", &Key::Backend(2)), Some(2));
        assert_eq!(placement.backend(b"", &Key::Backend(3)), None);
    }

    #[test]
    fn without_backends_there_is_none() {
        for scheme in [Scheme::Modulo, Scheme::Ketama] {
            let placement = Placement::new(scheme, []);
            assert_eq!(backend(&placement, "key"), None);
            assert_eq!(placement.backend(b"", &Key::Number(7)), None);
        }
        let placement = Placement::new(Scheme::Ketama, [("a:1", 0)]);
        assert_eq!(backend(&placement, "key"), None);
    }

    #[test]
    fn a_backend_that_goes_takes_only_its_own_keys_along() {
        let four = ["a:1", "b:1", "c:1", "d:1"];
        let before = Placement::new(Scheme::Ketama, four.map(|name| (name, 1)));
        let after = Placement::new(Scheme::Ketama, four[..3].iter().map(|name| (*name, 1)));
        assert_eq!(before.points().len(), 4 * POINTS as usize);
        for number in 0..1000 {
            let key = format!("key:{number}");
            let was = backend(&before, &key);
            assert!(was == Some(3) || was == backend(&after, &key), "{key}");
        }
    }
}
