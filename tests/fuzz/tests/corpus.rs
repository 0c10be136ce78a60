//! Runs every target on its corpus, and on a fixed sequence of mutations of it.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use shunt_fuzz::{TARGETS, Target};

/// Mutated inputs for each target.
const CHANGED: usize = 4_000;
/// The maximum length of a mutated input.
const LONGEST: usize = 4096;

/// A pseudo-random generator: xorshift.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end.max(1)
    }

    /// Applies one mutation, of the kinds that libFuzzer uses.
    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(bytes.len() + 1);
        match self.below(7) {
            0 => bytes.insert(at, self.below(256) as u8),
            1 => drop(bytes.drain(at..(at + self.below(8)).min(bytes.len()))),
            2 => bytes.truncate(at),
            3 => {
                let from = self.below(other.len() + 1);
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            4 => {
                let word = [0, 1, u64::MAX, 1 << 63, 1 << 62, 4096][self.below(6)];
                let end = (at + 8).min(bytes.len());
                bytes.splice(at..end, word.to_le_bytes());
            }
            choice => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = if choice == 5 { *byte ^ 1 << self.below(8) } else { self.below(256) as u8 };
                }
            }
        }
        bytes.truncate(LONGEST);
    }
}

fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut inputs: Vec<_> = files.map(|file| file.expect("it can be listed").path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty", folder.display());
    inputs.into_iter().map(|path| (path.clone(), fs::read(path).expect("it can be read"))).collect()
}

/// Runs a target on one input. An input that finds a bug is written to a file, to be run again and
/// added to the corpus.
fn run(name: &str, target: Target, bytes: &[u8], what: &str) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(bytes))) {
        let kept = std::env::temp_dir().join(format!("shunt-fuzz-{name}"));
        let _ = fs::write(&kept, bytes);
        eprintln!("{name}: {what}; the input is in {}", kept.display());
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn every_target_survives_its_corpus_and_changes_to_it() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        for (path, bytes) in &inputs {
            run(name, target, bytes, &path.display().to_string());
        }
        let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
        for round in 0..CHANGED {
            let mut bytes = inputs[numbers.below(inputs.len())].1.clone();
            for _ in 0..=numbers.below(6) {
                let other = &inputs[numbers.below(inputs.len())].1;
                numbers.change(&mut bytes, other);
            }
            run(name, target, &bytes, &format!("change {round}"));
        }
    }
}
