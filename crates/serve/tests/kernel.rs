//! The kernel takes every builtin service, and what it does with bytes there is what it does in user space. Needs root.

use shunt_serve::engine::try_kernel;
use shunt_serve::service::{Parse, Service, Verdict, builtin, trial::Trial};

#[test]
fn the_verifier_takes_every_builtin() {
    for builtin in builtin::all() {
        // Its functions each by itself, and all of it with the engine, which is more than their sum to the verifier.
        if let Err(error) = Trial::load(builtin.object).map(drop).and_then(|()| try_kernel(builtin.object)) {
            panic!("{}: {error}", builtin.name);
        }
    }
}

#[test]
fn lines_end_where_they_end() {
    let line = builtin::named("line-echo").expect("a builtin");
    let mut trial = Trial::load(line.object).unwrap();
    for length in 0..200 {
        let mut bytes = vec![b'x'; length];
        assert_eq!(trial.parse(&bytes).unwrap(), Parse::More);
        assert_eq!(line.native.parse(&bytes), Parse::More);
        bytes.push(b'\n');
        for rest in 0..3 {
            assert_eq!(trial.parse(&bytes).unwrap(), Parse::Message(length + 1), "{rest} bytes more");
            assert_eq!(line.native.parse(&bytes), Parse::Message(length + 1), "{rest} bytes more");
            bytes.push(b'\n');
        }
        assert_eq!(trial.decide(&bytes).unwrap(), Verdict::Echo);
    }
}
