//! Tests that the kernel accepts every builtin service and gives the results of user space. Needs
//! root.

use shunt_serve::engine::try_kernel;
use shunt_serve::service::{Parse, Service, Verdict, builtin, trial::Trial};

#[test]
fn the_verifier_takes_every_builtin() {
    for builtin in builtin::all() {
        // Verify each function separately, and then the whole engine, which is harder for the
        // verifier.
        if let Err(error) = Trial::load(builtin.object)
            .map(drop)
            .and_then(|()| try_kernel(builtin.object, builtin.native.properties().answers))
        {
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
