//! Servers that root starts and that chroot: ngIRCd in Debian's configuration, before it changes
//! its user, and a server that forks in the chroot. Needs root.

use shunt_compat::{Expected, both};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);
const PEOPLE: usize = 6;

#[test]
fn ngircd() {
    both(2 * LIMIT, |host| {
        let port = host.port();
        let root = host.path("root");
        fs::create_dir(&root).expect("own directory");
        let config = format!(
            "[Global]\nName = irc.test\nInfo = a test\nListen = 127.0.0.1\nPorts = {port}\nMotdPhrase = hello\n\
             ServerUID = nobody\nServerGID = nogroup\nAdminEMail = admin@irc.test\n\
             [Options]\nDNS = no\nIdent = no\nPAM = no\nChrootDir = {}\n\
             [Limits]\nMaxConnectionsIP = 0\nMaxConnections = 0\n",
            root.display()
        );
        let config = host.write("ngircd.conf", config);
        let server = host.program("ngircd").arg("--nodaemon").arg("--config").arg(config).start("ngircd");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let clients =
            host.script("python3", "irc.py").words(&format!("{port} {PEOPLE} 15")).run("irc", LIMIT);
        transport.expect(Expected { port, connections: PEOPLE, share: 0.5 });
        drop(server);
        clients.stdout
    });
}

/// The child cannot reach the broker, and `shunt explain` reports that.
#[test]
fn forked_behind_another_root_directory() {
    both(2 * LIMIT, |host| {
        let port = host.port();
        let root = host.path("root");
        fs::create_dir(&root).expect("own directory");
        let mut server = host.script("python3", "behind.py").arg(port.to_string()).arg(&root).start("server");
        server.wait_for_output("child", LIMIT);
        let output = server.output();
        let child = output.split_whitespace().nth(1).expect("child and a number").parse().expect("a number");
        let mut client = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
        for _ in 0..500 {
            client.write_all(b"x").expect("the child reads");
            client.read_exact(&mut [0]).expect("the child writes");
        }
        if let Some(text) = host.explain(child) {
            assert!(text.contains("other_root: It was forked behind another root directory"), "{text}");
            assert!(!text.contains("too_few_operations"), "{text}");
        }
        drop(client);
        assert!(server.wait(LIMIT).success(), "{}", host.logs());
    });
}
