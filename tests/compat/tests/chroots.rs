//! A server that root starts and that goes behind another root directory before it becomes another user: ngIRCd as Debian sets it up.
//! Needs root.

use shunt_compat::{Expected, both};
use std::fs;
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
        let road = host.watch_road();
        let clients =
            host.script("python3", "irc.py").words(&format!("{port} {PEOPLE} 15")).run("irc", LIMIT);
        road.expect(Expected { port, connections: PEOPLE, share: 0.5 });
        drop(server);
        clients.stdout
    });
}
