//! Tests that selected connections in use get other limits and priorities, and others do not. Needs
//! root.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};

use rustix::net::sockopt::{ip_tos, ipv6_tclass, socket_cookie};
use shunt_kernel::shape::{Shape, Shaper};
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
        let (limited, class) = (Some(1_000_000), 0x1_0020);
        assert_eq!(change(Shape { rate: limited, tos: None, traffic_class: None, priority: class }), 1);
        assert_eq!(options(&one), (1_000_000, 0, class));
        assert_eq!(change(Shape { rate: None, tos: Some(32), traffic_class, priority: 3 }), 1);
        assert_eq!(options(&one), (u64::MAX, 32, 3));
        assert_eq!(ipv6_tclass(&one).ok(), traffic_class.map(u32::from));
        assert_eq!(options(&other), before);
        let nobody = Shape { rate: limited, tos: None, traffic_class: None, priority: 0 };
        assert_eq!(shaper.change(&HashMap::from([(u64::MAX, nobody)])).unwrap(), 0);
    }
}
