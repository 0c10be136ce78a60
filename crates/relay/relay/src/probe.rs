//! Checks this host for features that a relay uses. They have no side effects. `shunt doctor` calls
//! them.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;

use rustix::net::sockopt;
use shunt_kernel::window::Windows;
use shunt_sys::{Errno, netns};
use socket2::{Domain, Socket, Type};

use crate::config::Loaded;
use crate::intercept::Rules;
use crate::queue::Queue;
use crate::socket;
use crate::tool::Tool;

/// Tries everything that interception needs, in a new network namespace without processes. Returns
/// the error if it fails.
pub fn interception() -> Result<(), String> {
    let done = netns::inside_new(|| Ok(intercept()));
    done.unwrap_or_else(|errno| match errno {
        Errno::PERM => Err("needs CAP_NET_ADMIN and, to be tried, CAP_SYS_ADMIN".to_owned()),
        errno => Err(format!("no network namespace to try it in: {errno}")),
    })
}

/// Loads the program that sets initial congestion windows. Returns the error if it fails.
pub fn windows() -> Result<(), String> {
    Windows::attach().map(drop).map_err(|error| error.to_string())
}

/// Returns an error if connections cannot use this congestion control, which is given by the
/// kernel's name.
pub fn congestion(algorithm: &str) -> Result<(), String> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).map_err(|error| error.to_string())?;
    sockopt::set_tcp_congestion(socket.as_fd(), algorithm).map_err(|error| error.to_string())
}

fn intercept() -> Result<(), String> {
    let text = "name = 'probe'\n[intercept]\n[[route]]\nto = ['192.0.2.0/24', '2001:db8::/32']\n";
    let loaded = Loaded::parse(text).map_err(|error| error.to_string())?;
    let intercept = loaded.config.intercept.as_ref().expect("the text has it");
    let ip = Tool { program: "ip", package: "iproute2" };
    ip.run(["link", "set", "lo", "up"], "").map_err(|error| error.to_string())?;
    let _rules = Rules::make(intercept, &loaded.config).map_err(|error| error.to_string())?;
    Queue::bind(intercept.queue).map_err(|error| format!("netfilter queue: {error}"))?;
    let any = (Ipv4Addr::UNSPECIFIED, 0).into();
    let transparent = socket::new(any).and_then(|socket| socket::make_transparent(&socket, any));
    transparent.map_err(|error| format!("IP_TRANSPARENT: {error}"))
}
