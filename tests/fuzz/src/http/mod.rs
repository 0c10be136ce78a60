//! Requests for the HTTP proxy. Every backend must see exactly the requests that the proxy has
//! forwarded, whatever it tolerates, and however the bytes arrive. Replies must not change when
//! they are parsed and written twice.

mod backend;

use shunt_serve_http::message::reply::{self, After};
use shunt_serve_http::message::request::{self, Additions};
use shunt_serve_http::message::{Body, Parsed, no_fields};

use backend::{Lenience, Seen};

const LIMIT: usize = 2048;

/// What the proxy has forwarded.
#[derive(Debug, Default, PartialEq)]
struct Forwarded {
    bytes: Vec<u8>,
    requests: Vec<Seen>,
    /// It was refused, or did not arrive as a whole.
    is_partial: bool,
}

pub(crate) fn run(bytes: &[u8]) {
    let whole = forward(bytes, bytes.len().max(1));
    // Eight of the kinds for each input, which bound the time.
    let first = bytes.iter().fold(0, |sum, byte| sum ^ usize::from(*byte)) % 8;
    for lenience in [Lenience::default()].into_iter().chain(Lenience::all().skip(first).step_by(8)) {
        let seen = backend::parse(&whole.bytes, lenience);
        assert!(seen == whole.requests, "{lenience:?}: {seen:?} instead of {whole:?}");
    }
    let size = 1 + bytes.first().map_or(0, |byte| usize::from(*byte) % 7);
    let pieces = forward(bytes, size);
    assert!(pieces.requests == whole.requests, "{pieces:?} instead of {whole:?}");
    reply_twice(bytes);
}

/// Forwards the bytes of a client, which arrive in pieces of this size.
fn forward(bytes: &[u8], size: usize) -> Forwarded {
    let (mut done, mut input, mut body) = (Forwarded::default(), Vec::new(), Body::Done);
    for piece in bytes.chunks(size) {
        input.extend_from_slice(piece);
        if !take(&mut input, &mut body, &mut done) {
            return done;
        }
    }
    if done.is_partial {
        done.requests.pop();
    }
    done
}

/// Takes the bytes that have arrived. Returns false if the connection ends.
fn take(input: &mut Vec<u8>, body: &mut Body, done: &mut Forwarded) -> bool {
    loop {
        if body.is_done() {
            let mut slots = no_fields();
            let request = match request::parse(input, &mut slots, LIMIT) {
                Ok(Parsed::Complete(request)) => request,
                Ok(Parsed::Incomplete) => return true,
                Err(_) => return false,
            };
            let mut target = Vec::new();
            request.target.write(&mut target);
            let added = Additions {
                client: "::1",
                x_forwarded: true,
                forwarded: true,
                host: "h",
                ..Additions::default()
            };
            request.write(&added, &mut done.bytes);
            done.requests.push(Seen { method: request.method.as_bytes().to_vec(), target, body: Vec::new() });
            *body = Body::new(request.framing, false);
            let length = request.length;
            assert!(length > 0 && length <= LIMIT);
            input.drain(..length);
            done.is_partial = !body.is_done();
            if !done.is_partial {
                continue;
            }
        }
        if input.is_empty() {
            return true;
        }
        let (mut tail, before) = (Vec::new(), input.clone());
        let Ok(passed) = body.pass(input, &mut tail) else {
            done.requests.pop();
            done.is_partial = false;
            return false;
        };
        assert!(passed.kept <= passed.taken && passed.taken <= input.len() && passed.taken > 0);
        done.bytes.extend_from_slice(&input[..passed.kept]);
        done.bytes.extend_from_slice(&tail);
        input.drain(..passed.taken);
        assert!(*input == before[passed.taken..]);
        done.is_partial = !body.is_done();
        if !done.is_partial {
            let seen = done.requests.last_mut().expect("its head was forwarded");
            // The content as the strictest backend reads it.
            seen.body = backend::parse(&done.bytes, Lenience::default()).pop().expect("it is complete").body;
        }
    }
}

fn reply_twice(bytes: &[u8]) {
    let mut slots = no_fields();
    for to_head in [false, true] {
        let Ok(Parsed::Complete(first)) = reply::parse(bytes, &mut slots, LIMIT, to_head) else { continue };
        let (mut out, mut again) = (Vec::new(), no_fields());
        first.write(After::Stays, true, &mut out);
        let Ok(Parsed::Complete(second)) = reply::parse(&out, &mut again, 2 * LIMIT, to_head) else {
            panic!("{}", out.escape_ascii());
        };
        assert_eq!((first.status, first.body(to_head)), (second.status, second.body(to_head)));
        assert_eq!(second.length, out.len());
        let mut slots = no_fields();
        let _ = reply::parse(&out, &mut slots, 2 * LIMIT, to_head);
    }
}
