//! Compares the services' parsers in the kernel with those in user space: on the corpora, cut off
//! at every byte, and on a bounded number of mutations. Needs root.

use std::fs;
use std::path::Path;

use shunt_serve::service::trial::{MAX_BYTES, Trial};
use shunt_serve::service::{Refusal, Service, builtin};

/// Mutated inputs for each service.
const CHANGED: usize = 1_500;

#[test]
fn the_kernel_says_the_same() {
    for (corpus, service) in
        [("memcached", "memcached-router"), ("resp", "redis-router"), ("thrift", "thrift-forwarder")]
    {
        let builtin = builtin::named(service).expect("a builtin");
        let mut trial = Trial::load(builtin.object).unwrap_or_else(|error| panic!("{service}: {error}"));
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(corpus);
        let mut inputs: Vec<Vec<u8>> = fs::read_dir(folder)
            .expect("it is there")
            .map(|file| fs::read(file.expect("it can be listed").path()).expect("it can be read"))
            .filter(|bytes| bytes.len() <= MAX_BYTES)
            .collect();
        inputs.sort();
        let mut compare = |bytes: &[u8]| {
            let native = &builtin.native;
            assert_eq!(trial.parse(bytes).unwrap(), native.parse(bytes), "{service} {bytes:x?}");
            assert_eq!(trial.parse_reply(bytes).unwrap(), native.parse_reply(bytes), "{service} {bytes:x?}");
            assert_eq!(trial.decide(bytes).unwrap(), native.decide(bytes), "{service} {bytes:x?}");
            let head = &bytes[..bytes.len().min(128)];
            let why = Refusal::ALL[bytes.len() % Refusal::ALL.len()];
            assert_eq!(trial.refuse(head, why).unwrap(), native.refuse(head, why), "{service} {head:x?}");
        };
        for input in &inputs {
            (0..=input.len()).for_each(|end| compare(&input[..end]));
        }
        let mut number = 0x9e37_79b9_7f4a_7c15_u64;
        let mut below = |end: usize| {
            number ^= number << 13;
            number ^= number >> 7;
            number ^= number << 17;
            (number >> 11) as usize % end.max(1)
        };
        for _ in 0..CHANGED {
            let mut bytes = inputs[below(inputs.len())].clone();
            for _ in 0..=below(4) {
                let at = below(bytes.len());
                match (below(4), bytes.get_mut(at)) {
                    (0, Some(byte)) => *byte ^= 1 << below(8),
                    (1, Some(byte)) => *byte = below(256) as u8,
                    (2, _) => bytes.truncate(at),
                    _ => bytes.insert(at, [0, 1, b' ', b'\n', 0x80, 0xff][below(6)]),
                }
            }
            compare(&bytes);
        }
    }
}
