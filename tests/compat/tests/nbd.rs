//! Block devices over TCP: nbdkit, used by libnbd with several connections, and by QEMU. QEMU
//! enables sending without a copy (SO_ZEROCOPY) on every socket, and uses it only for migrations.

use shunt_compat::{Expected, Host, Program, both};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);
const DISK: usize = 32 << 20;

struct Server {
    _program: Program,
    port: u16,
}

impl Server {
    fn start(host: &Host) -> Server {
        let port = host.port();
        let program =
            host.program("nbdkit").words(&format!("-f -i 127.0.0.1 -p {port} memory {DISK}")).start("nbdkit");
        host.wait_for_port(port);
        Server { _program: program, port }
    }

    fn url(&self) -> String {
        format!("nbd://127.0.0.1:{}/", self.port)
    }
}

fn image(host: &Host) -> (PathBuf, Vec<u8>) {
    let line = |number: usize| format!("line {number} of the image\n").into_bytes();
    let content: Vec<u8> = (0..).flat_map(line).take(DISK).collect();
    (host.write("image", &content), content)
}

#[test]
fn copied_over_several_connections() {
    both(2 * LIMIT, |host| {
        let server = Server::start(host);
        let (image, content) = image(host);
        let back = host.path("back");
        let copy = || host.program("nbdcopy").words("--connections 4 --requests 16");
        let transport = host.watch_transport();
        for _ in 0..2 {
            copy().arg(&image).arg(server.url()).run("nbdcopy", LIMIT);
            copy().arg(server.url()).arg(&back).run("nbdcopy", LIMIT);
            assert!(fs::read(&back).ok().as_ref() == Some(&content), "what was read back");
        }
        // Which of its threads get work is up to the program.
        transport.expect(Expected { port: server.port, connections: 2, share: 0.5 });
    });
}

#[test]
fn used_by_qemu() {
    both(2 * LIMIT, |host| {
        let server = Server::start(host);
        let (image, content) = image(host);
        let back = host.path("back");
        let transport = host.watch_transport();
        let convert = || host.program("qemu-img").words("convert -n -f raw -O raw");
        convert().arg(&image).arg(server.url()).run("qemu-img", LIMIT);
        host.program("qemu-io")
            .words("-f raw")
            .args(["-c", "aio_write -P 9 8M 8M", "-c", "aio_flush", "-c", "read -P 9 9M 1M"])
            .arg(server.url())
            .run("qemu-io", LIMIT);
        host.program("qemu-img")
            .words("bench -f raw -c 20000 -d 8 -s 4096")
            .arg(server.url())
            .run("bench", LIMIT);
        host.program("nbdcopy").arg(server.url()).arg(&back).run("nbdcopy", LIMIT);
        let mut expected = content;
        expected[8 << 20..16 << 20].fill(9);
        assert!(fs::read(&back).ok() == Some(expected), "what QEMU has written");
        transport.expect(Expected { port: server.port, connections: 1, share: 0.5 });
        let report = transport.report(server.port);
        assert!(!report.contains("zero_copy"), "{report}");
    });
}
