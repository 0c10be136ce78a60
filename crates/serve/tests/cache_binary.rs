//! Tests that the cache refuses clients of memcached's binary protocol as that protocol does. Needs
//! root.

#[allow(dead_code, reason = "the cache has no backends")]
mod common;

use std::io::{Read, Write};

use common::{ENGINES, Serving};
use shunt_netns::Net;

/// A request for the value of the key `key`: the header and the key. The client gets `opaq` back.
const GET: &[u8] = b"\x80\0\0\x03\0\0\0\0\0\0\0\x03opaq\0\0\0\0\0\0\0\0key";

#[test]
fn binary_clients_get_an_error_that_they_understand() {
    for engine in ENGINES {
        let serving = Serving::cache(Net::new(), engine, 16 << 20);
        for cut in [1, 23, 24, GET.len()] {
            let mut client = serving.connect();
            client.write_all(&GET[..cut]).unwrap();
            // The rest may come too late for a connection that is closed already.
            let _ = client.write_all(&GET[cut..]);
            let mut answer = [0; 24];
            client.read_exact(&mut answer).unwrap();
            assert_eq!((&answer[..8], &answer[12..16]), (&b"\x81\0\0\0\0\0\0\x81"[..], &b"opaq"[..]));
            let mut text = vec![0; u32::from_be_bytes(answer[8..12].try_into().unwrap()) as usize];
            client.read_exact(&mut text).unwrap();
            assert!(text.ends_with(b"without the binary one"));
        }
        serving.wait("all are refused", |status| status["drops"]["unknown-version"] == 4);
        serving.wait("all are closed", |status| status["open-connections"] == 0);
    }
}
