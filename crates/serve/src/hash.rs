//! Maps keys to backends in the same way as clients of memcached, so that shunt between such
//! clients and their servers finds every value where a client has stored it.

use md5::{Digest, Md5};

use crate::service::Key;

/// The scheme that distributes keys over backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// A numeric key, or the one-at-a-time hash of a key of bytes, modulo the number of backends.
    /// This is libmemcached's default. When backends are added or removed, nearly every key moves.
    Modulo,
    /// The continuum of libketama and of libmemcached's MEMCACHED_BEHAVIOR_KETAMA_WEIGHTED. When
    /// backends are added or removed, only their keys move. A numeric key is hashed as its decimal
    /// digits.
    Ketama,
}

/// Points of a backend of average weight. Each digest gives four.
const POINTS: u32 = 160;
/// The port that is left out of a server's name.
const DEFAULT_PORT: &str = ":11211";

/// A point of the continuum. Its backend owns the keys after the previous point up to this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// The position, which is compared with the [`ketama`] hash of a key.
    pub value: u32,
    /// The backend's index, counted from 0.
    pub backend: u32,
}

/// The mapping of keys to a list of backends.
#[derive(Clone, Debug)]
pub struct Placement {
    scheme: Scheme,
    backends: usize,
    points: Vec<Point>,
}

impl Placement {
    /// Builds the mapping for backends, each HOST:PORT and a weight. Only the continuum uses
    /// weights. A backend of weight 0 has no keys there.
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

    /// Returns the index of the key's backend, counted from 0, or `None` if there are no backends
    /// or the service has chosen one that does not exist.
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

    /// Returns the sorted continuum, which is empty for [`Scheme::Modulo`].
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Returns the backend of the first point at or after `value`, or of the first point of all if
    /// there is none.
    fn nearest(&self, value: u32) -> Option<usize> {
        let after = self.points.partition_point(|point| point.value < value);
        let point = self.points.get(after).or(self.points.first())?;
        Some(point.backend as usize)
    }
}

/// Returns the number of digests of a backend. Like libketama it computes in single precision, on
/// which the rounding of the last digest depends.
fn digests(weight: u32, total: u64, backends: usize) -> u32 {
    if total == 0 {
        return 0;
    }
    let share = weight as f32 / total as f32;
    let digests = share * POINTS as f32 / 4.0 * backends as f32;
    (f64::from(digests) + 0.000_000_000_1).floor() as u32
}

/// Returns the first four bytes of the key's MD5. `shunt_hash_bytes` in hash.h computes the same.
pub fn ketama(key: &[u8]) -> u32 {
    let digest = Md5::digest(key);
    u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]])
}

/// Returns Jenkins' one-at-a-time hash as libmemcached computes it, with signed bytes.
/// `shunt_hash_bytes` in hash.h computes the same.
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
