//! Tests that selected connections in use get other limits and priorities, and others do not. Needs
//! root.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};

use rustix::net::sockopt::{ip_tos, ipv6_tclass, socket_cookie};
use shunt_kernel::shape::{Outcome, Shape, Shaper};
use shunt_sys::tuning::{max_pacing_rate, priority};

fn options(socket: &TcpStream) -> (u64, u8, u32) {
    (max_pacing_rate(socket).unwrap(), ip_tos(socket).unwrap(), priority(socket).unwrap())
}

#[test]
fn a_socket_is_changed_while_another_is_not() {
    let mut shaper = Shaper::load().unwrap();
    for host in ["127.0.0.1:0", "[::ffff:127.0.0.1]:0", "[::1]:0"] {
        let traffic_class = host.starts_with('[').then_some(32);
        let listener = TcpListener::bind(host).unwrap();
        let [one, other] = [(); 2].map(|()| TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (before, cookie) = (options(&other), socket_cookie(&one).unwrap());
        let mut change = |shape| shaper.change(&HashMap::from([(cookie, shape)])).unwrap();
        let all = || Outcome { changed: 1, ..Outcome::default() };
        let (limited, class) = (Some(1_000_000), 0x1_0020);
        assert_eq!(change(Shape { rate: limited, tos: None, traffic_class: None, priority: class }), all());
        assert_eq!(options(&one), (1_000_000, 0, class));
        assert_eq!(change(Shape { rate: None, tos: Some(32), traffic_class, priority: 3 }), all());
        assert_eq!(options(&one), (u64::MAX, 32, 3));
        assert_eq!(ipv6_tclass(&one).ok(), traffic_class.map(u32::from));
        assert_eq!(options(&other), before);
        let nobody = Shape { rate: limited, tos: None, traffic_class: None, priority: 0 };
        let gone = Outcome { gone: 1, ..Outcome::default() };
        assert_eq!(shaper.change(&HashMap::from([(u64::MAX, nobody)])).unwrap(), gone);
    }
}

/// The kernel rejects a traffic class for an IPv4 socket, and the error is reported.
#[test]
fn a_socket_that_keeps_an_option_is_reported_with_the_error() {
    let mut shaper = Shaper::load().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let shape = Shape { rate: None, tos: None, traffic_class: Some(32), priority: 3 };
    let changes = HashMap::from([(socket_cookie(&one).unwrap(), shape)]);
    let Outcome { changed, gone, refused } = shaper.change(&changes).unwrap();
    assert_eq!((changed, gone, refused.values().sum::<usize>()), (0, 0, 1));
    assert!(refused.keys().all(|error| (1..4096).contains(error)), "{refused:?}");
    assert_eq!(priority(&one), Ok(3), "the other options are set");
}
