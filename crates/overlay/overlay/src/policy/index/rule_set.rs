//! Sets of rules, and the rules that are in several sets.
//!
//! A set is a bitmap of positions. It stores only the words that are not zero, so the many sets of an
//! index take little memory, and the rules that are in all of some sets are found by skipping what
//! one of them lacks:
//!
//! ```text
//! from    words  0           17  18          70
//! to      words      5       17          61  70      joined: words 17 and 70
//! ports   words  0   5   9   17  18  40  61  70
//! ```

use std::collections::BTreeMap;

/// The rules of a chain at the positions `64 * at` to `64 * at + 63`, as far as they are in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Word {
    at: u32,
    bits: u64,
}

/// A set of rules of a chain, by their positions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct RuleSet(Box<[Word]>);

/// A set of rules that is being made.
#[derive(Clone, Debug, Default)]
pub(super) struct Builder(BTreeMap<u32, u64>);

impl RuleSet {
    /// Returns a reader of its words.
    pub(super) fn words(&self) -> Words<'_> {
        Words(&self.0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the positions of its rules.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().flat_map(|word| positions(word.at, word.bits))
    }
}

impl FromIterator<usize> for RuleSet {
    fn from_iter<T: IntoIterator<Item = usize>>(rules: T) -> RuleSet {
        let mut builder = Builder::default();
        rules.into_iter().for_each(|rule| builder.insert(rule));
        builder.build()
    }
}

impl Builder {
    pub(super) fn insert(&mut self, rule: usize) {
        *self.0.entry((rule / 64) as u32).or_default() |= 1 << (rule % 64);
    }

    pub(super) fn remove(&mut self, rule: usize) {
        let at = (rule / 64) as u32;
        if let Some(bits) = self.0.get_mut(&at) {
            *bits &= !(1 << (rule % 64));
            if *bits == 0 {
                self.0.remove(&at);
            }
        }
    }

    pub(super) fn add(&mut self, set: &RuleSet) {
        for word in &set.0 {
            *self.0.entry(word.at).or_default() |= word.bits;
        }
    }

    pub(super) fn build(&self) -> RuleSet {
        RuleSet(self.0.iter().map(|(at, bits)| Word { at: *at, bits: *bits }).collect())
    }
}

/// Reads the words of a set in ascending order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Words<'a>(&'a [Word]);

impl Words<'_> {
    /// Skips the words before `from`. Returns the number of the next one.
    fn seek(&mut self, from: u32) -> Option<u32> {
        if self.0.first()?.at < from {
            self.0 = &self.0[self.0.partition_point(|word| word.at < from)..];
        }
        self.0.first().map(|word| word.at)
    }

    /// Returns the word with that number, which must not be smaller than in former calls.
    pub(super) fn word(&mut self, at: u32) -> u64 {
        match self.seek(at) {
            Some(next) if next == at => self.0[0].bits,
            _ => 0,
        }
    }
}

/// The rules of which one condition holds for a connection, as unions of sets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Condition<'a> {
    /// The condition holds for the rules of these sets.
    pub(super) certain: [Words<'a>; 3],
    /// The condition may hold for the rules of this set.
    pub(super) possible: Words<'a>,
}

impl Condition<'_> {
    fn seek(&mut self, from: u32) -> Option<u32> {
        let [a, b, c] = &mut self.certain;
        [a, b, c, &mut self.possible].into_iter().filter_map(|words| words.seek(from)).min()
    }

    /// Returns the bits of the rules for which it holds, and of those for which it holds or may hold.
    fn word(&mut self, at: u32) -> (u64, u64) {
        let certain = self.certain.iter_mut().fold(0, |bits, words| bits | words.word(at));
        (certain, certain | self.possible.word(at))
    }
}

/// Rules that match a connection for certain, and rules that may match it or do: a word of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matching {
    pub(super) at: u32,
    pub(super) certain: u64,
    /// Includes `certain`.
    pub(super) possible: u64,
}

impl Matching {
    /// Returns the position of the first rule that matches for certain.
    pub(super) fn first(self) -> Option<usize> {
        positions(self.at, self.certain).next()
    }

    /// Returns the bits of the rules that may decide: none after the first that matches for certain.
    pub(super) fn deciding(self) -> u64 {
        let first = self.certain & self.certain.wrapping_neg();
        self.possible & (first | first.wrapping_sub(1))
    }
}

/// Returns the positions of the rules in a word.
pub(super) fn positions(at: u32, mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let next = (bits != 0).then(|| at as usize * 64 + bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        next
    })
}

/// Iterates over the rules for which all conditions may hold.
#[derive(Clone, Debug)]
pub(super) struct Joined<'a, const N: usize> {
    conditions: [Condition<'a>; N],
    at: u32,
}

impl<'a, const N: usize> Joined<'a, N> {
    pub(super) fn new(conditions: [Condition<'a>; N]) -> Joined<'a, N> {
        Joined { conditions, at: 0 }
    }

    /// Returns the number of the next word that all conditions have.
    fn next_common(&mut self) -> Option<u32> {
        loop {
            let found = self.conditions.iter_mut().try_fold(self.at, |at, it| it.seek(at))?;
            if found == self.at {
                return Some(found);
            }
            self.at = found;
        }
    }
}

impl<const N: usize> Iterator for Joined<'_, N> {
    type Item = Matching;

    fn next(&mut self) -> Option<Matching> {
        loop {
            let at = self.next_common()?;
            self.at = at + 1;
            let both = |(certain, possible), it: &mut Condition<'_>| {
                let word = it.word(at);
                (certain & word.0, possible & word.1)
            };
            let (certain, possible) = self.conditions.iter_mut().fold((!0, !0), both);
            if possible != 0 {
                return Some(Matching { at, certain, possible });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_into_it() {
        let rules = [0, 1, 63, 64, 700, 6_399];
        let set: RuleSet = rules.into_iter().rev().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), rules);
        assert_eq!(set.0.len(), 4, "empty words are not stored");
        let mut builder = Builder::default();
        builder.add(&set);
        builder.insert(5);
        for rule in rules.into_iter().chain([9]) {
            builder.remove(rule);
        }
        assert_eq!(builder.build(), [5].into_iter().collect());
        assert!(RuleSet::default().is_empty() && !set.is_empty());
    }

    /// All combinations of four rules that each condition may hold for, in two places.
    #[test]
    fn joined_conditions_hold_for_the_rules_of_all() {
        let of = |bits: u32, scale: usize| -> RuleSet {
            (0..4).filter(|rule| bits & 1 << rule != 0).map(|rule| rule * scale).collect()
        };
        for scale in [1, 100] {
            for bits in 0..1 << 12 {
                let [certain, possible, other] = [0, 4, 8].map(|shift| of(bits >> shift & 15, scale));
                let one = Condition {
                    certain: [certain.words(), Words::default(), certain.words()],
                    possible: possible.words(),
                };
                let two = Condition {
                    certain: [Words::default(), other.words(), Words::default()],
                    ..Default::default()
                };
                let joined: Vec<Matching> = Joined::new([one, two]).collect();
                let all = |bits: fn(&Matching) -> u64| -> Vec<usize> {
                    joined.iter().flat_map(|it| positions(it.at, bits(it))).collect()
                };
                assert_eq!(all(|it| it.certain), of(bits & bits >> 8 & 15, scale).iter().collect::<Vec<_>>());
                let either = (bits | bits >> 4) & bits >> 8 & 15;
                assert_eq!(all(|it| it.possible), of(either, scale).iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn no_rule_decides_after_the_first_that_matches() {
        let matching = |certain, possible| Matching { at: 2, certain, possible };
        assert_eq!(matching(0b1000, 0b1111_1010).deciding(), 0b1010);
        assert_eq!(matching(0b1000, 0b1111_1010).first(), Some(131));
        assert_eq!(matching(1 << 63, 1 << 63 | 1).deciding(), 1 << 63 | 1);
        assert_eq!(matching(0, 1 << 63 | 1).deciding(), 1 << 63 | 1);
        assert_eq!(matching(0, !0).first(), None);
    }
}
