//! Commands for the cache. The answers must not depend on how the bytes are cut into pieces.

use shunt_serve::cache::Cache;
use shunt_serve::service::store::Session;
use shunt_serve::service::{Answer, Parse, Service, Verdict};

/// The answers so far, and whether the connection was closed.
#[derive(Debug, Default, PartialEq)]
struct Said {
    bytes: Vec<u8>,
    /// It was closed because of a line that did not end. That depends on the pieces.
    is_refused: bool,
    is_closed: bool,
}

pub(crate) fn run(bytes: &[u8]) {
    // The clock may tick in between, which changes times in answers.
    if bytes.windows(2).any(|pair| matches!(pair, b" t" | b" l"))
        || bytes.windows(5).any(|word| word == b"stats")
    {
        return;
    }
    let whole = talk(bytes, &[bytes.len()]);
    let sizes: Vec<usize> = bytes.iter().take(16).map(|byte| 1 + usize::from(*byte) % 40).collect();
    let pieces = talk(bytes, if sizes.is_empty() { &[1] } else { &sizes });
    if !whole.is_refused && !pieces.is_refused {
        assert!(whole == pieces, "{}\n{}", whole.bytes.escape_ascii(), pieces.bytes.escape_ascii());
    }
}

/// Sends bytes in pieces of these sizes, repeatedly.
fn talk(bytes: &[u8], sizes: &[usize]) -> Said {
    let cache = Cache::new(0, 1, false).expect("memory");
    let (mut session, mut said, mut input) = (Session::default(), Said::default(), Vec::new());
    let (mut rest, mut sizes) = (bytes, sizes.iter().cycle());
    while !rest.is_empty() && !said.is_closed {
        let size = *sizes.next().expect("it repeats");
        let (piece, more) = rest.split_at(rest.len().min(size.max(1)));
        input.extend_from_slice(piece);
        rest = more;
        take(&cache, &mut session, &mut input, &mut said);
    }
    said
}

fn take(cache: &Cache, session: &mut Session, input: &mut Vec<u8>, said: &mut Said) {
    let mut at = 0;
    while at < input.len() && !said.is_closed {
        match cache.parse_in(session, &input[at..]) {
            Parse::More => break,
            Parse::Message(length) if length > input.len() - at => break,
            Parse::Message(length) => {
                assert!(length > 0);
                match cache.decide_in(session, &input[at..at + length]) {
                    Verdict::Reply(bytes) => said.bytes.extend(bytes),
                    Verdict::Close(bytes) => {
                        said.bytes.extend(bytes);
                        said.is_closed = true;
                    }
                    verdict => panic!("{verdict:?}"),
                }
                at += length;
            }
            Parse::Refused(why) => {
                assert_eq!(cache.refuse_in(session, &input[at..], why), Answer::Close(Vec::new()));
                (said.is_refused, said.is_closed) = (true, true);
            }
        }
    }
    input.drain(..at);
}
