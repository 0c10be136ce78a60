//! Programs that root starts and that become another user. The broker is private to root, as `shunt
//! run` starts it, or open to all users. Needs root.

use shunt_compat::{Host, Mode, both, compile};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);

/// Makes the broker private to root.
fn close_broker(host: &Host) {
    if host.mode() == Mode::Shunt {
        fs::set_permissions(host.broker_socket(), fs::Permissions::from_mode(0o600)).expect("own socket");
    }
}

/// Opens the broker and its directories to all users.
fn open_broker(host: &Host) {
    if host.mode() == Mode::Shunt {
        let socket = host.broker_socket();
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("own socket");
        let directory = socket.parent().expect("a socket is in a directory");
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).expect("own directory");
    }
}

#[test]
fn who_becomes_another_user_keeps_the_broker() {
    both(2 * LIMIT, |host| {
        compile(host, "user", &[]);
        close_broker(host);
        for how in ["setuid", "seteuid", "setreuid", "setresuid", "by-number", "chroot", "chroot-by-number"] {
            let port = host.port();
            let transport = host.watch_transport();
            let gate = format!("gate.{how}");
            let running = host.program("./user").args([&port.to_string(), how, &gate]).start(how);
            transport.wait_for_shm(port, 1, LIMIT);
            host.write(&gate, "");
            assert_eq!(running.wait(LIMIT).stdout, "as user 65534\n");
        }
    });
}

#[test]
fn who_becomes_another_user_finds_the_broker_of_all_with_its_first_connection() {
    both(LIMIT, |host| {
        compile(host, "user", &[]);
        open_broker(host);
        let (port, transport) = (host.port(), host.watch_transport());
        // The program makes fewer turns than pass before a connection without a broker looks for
        // one again.
        let running = host.program("./user").args([&port.to_string(), "setuid", "gate", "100"]).start("user");
        transport.wait_for_shm(port, 1, LIMIT);
        host.write("gate", "");
        assert_eq!(running.wait(LIMIT).stdout, "as user 65534\n");
    });
}
