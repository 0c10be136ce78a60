//! The rate and priority options of a host connection's socket: those that its program has set,
//! combined with those that the policy demands.

use std::os::fd::AsFd;

use rustix::net::AddressFamily;
use rustix::net::sockopt::{ip_tos, ipv6_tclass, set_ip_tos, set_ipv6_tclass, socket_domain};
use shunt_kernel::secure::Tag;
use shunt_kernel::shape;
use shunt_sys::{Errno, tuning};

use crate::policy::Shape;

/// The values of the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Bytes per second. The largest number means no limit.
    rate: u64,
    tos: u8,
    /// The traffic class of IPv6 packets. `None` for an IPv4 socket.
    traffic_class: Option<u8>,
    priority: u32,
}

impl Options {
    /// Returns the defaults of a socket on which no option was set.
    pub(crate) fn unset(is_ipv6: bool) -> Options {
        Options { rate: u64::MAX, tos: 0, traffic_class: is_ipv6.then_some(0), priority: 0 }
    }

    pub(crate) fn of(socket: impl AsFd) -> Result<Options, Errno> {
        let socket = socket.as_fd();
        Ok(Options {
            rate: tuning::max_pacing_rate(socket)?,
            tos: ip_tos(socket)?,
            traffic_class: if is_ipv6(socket)? { Some(ipv6_tclass(socket)? as u8) } else { None },
            priority: tuning::priority(socket)?,
        })
    }

    /// Returns the options that apply under the policy. A program may choose a lower rate than the
    /// policy's.
    pub(crate) fn under(self, shape: Shape) -> Options {
        Options {
            rate: shape.rate.map_or(self.rate, |rate| rate.min(self.rate)),
            // The two lower bits are ECN's, which the kernel manages.
            tos: shape.dscp.map_or(self.tos, |dscp| dscp << 2),
            traffic_class: self.traffic_class.map(|own| shape.dscp.map_or(own, |dscp| dscp << 2)),
            priority: shape.priority.unwrap_or(self.priority),
        }
    }

    /// Returns the tag with these values, which the program reads from a socket that has others.
    pub(crate) fn told(self) -> Tag {
        Tag {
            rate: self.rate,
            priority: self.priority,
            tos: self.tos.into(),
            traffic_class: self.traffic_class.unwrap_or_default().into(),
        }
    }

    pub(crate) fn set(self, socket: impl AsFd) -> Result<(), Errno> {
        let socket = socket.as_fd();
        tuning::set_max_pacing_rate(socket, self.rate)?;
        set_ip_tos(socket, self.tos)?;
        if let Some(traffic_class) = self.traffic_class {
            set_ipv6_tclass(socket, traffic_class.into())?;
        }
        // Set last, since IP_TOS changes the priority too.
        tuning::set_priority(socket, self.priority)
    }

    /// Returns the changes that make a socket with the options `others` have these. The socket is
    /// the program's, so a program in the kernel sets them.
    pub(crate) fn instead_of(self, others: Options) -> shape::Shape {
        shape::Shape {
            rate: u32::try_from(self.rate).ok(),
            tos: (self.tos != others.tos).then_some(self.tos),
            traffic_class: self.traffic_class.filter(|own| Some(*own) != others.traffic_class),
            priority: self.priority,
        }
    }
}

fn is_ipv6(socket: impl AsFd) -> Result<bool, Errno> {
    Ok(socket_domain(socket)? == AddressFamily::INET6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Needs root.
    #[test]
    fn a_socket_has_what_the_policy_makes_of_it() {
        for (host, traffic_class) in [("127.0.0.1:0", None), ("[::1]:0", Some(184))] {
            let socket = TcpListener::bind(host).unwrap();
            let own = Options::of(&socket).unwrap();
            assert_eq!(own, Options::unset(traffic_class.is_some()));
            let shape =
                Shape { rate: Some(1_000_000), dscp: Some(46), priority: Some(0x1_0020), ..Shape::default() };
            own.under(shape).set(&socket).unwrap();
            let set = Options::of(&socket).unwrap();
            assert_eq!(set, Options { rate: 1_000_000, tos: 184, traffic_class, priority: 0x1_0020 });
            own.under(Shape::default()).set(&socket).unwrap();
            assert_eq!(Options::of(&socket).unwrap(), own);
            let slow = Options { rate: 500, ..own };
            assert_eq!(slow.under(shape).rate, 500);
            let back = shape::Shape {
                rate: None,
                tos: Some(0),
                traffic_class: traffic_class.map(|_| 0),
                priority: 0,
            };
            assert_eq!(own.instead_of(set), back);
            assert_eq!(own.instead_of(own), shape::Shape { tos: None, traffic_class: None, ..back });
        }
    }
}
