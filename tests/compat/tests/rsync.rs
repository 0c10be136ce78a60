//! rsync's daemon: a tree is sent to it and fetched again. The receiving side forks, and both
//! processes use the connection.

use shunt_compat::{Host, both};
use std::fs;
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const FILES: usize = 40;

/// Returns the files in `directory`, each with its content.
fn content(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found: Vec<_> = fs::read_dir(directory)
        .expect("rsync made it")
        .map(|entry| {
            let entry = entry.expect("own directory");
            (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).expect("own file"))
        })
        .collect();
    found.sort();
    found
}

fn transfer(host: &Host, from: &str, to: &str) {
    let done =
        host.program("rsync").args(["-a", "--no-whole-file", "--checksum", from, to]).run("rsync", LIMIT);
    assert!(done.success(), "{}", host.logs());
}

#[test]
fn a_tree_comes_back_as_it_was_sent() {
    both(LIMIT, |host| {
        let port = host.port();
        let there = host.path("there");
        let here = host.path("here");
        for directory in [&there, &here] {
            fs::create_dir(directory).expect("own directory");
        }
        for index in 0..FILES {
            let bytes: Vec<u8> = (0..index * 20_000).map(|at| (at / 7 * (index + 1) % 251) as u8).collect();
            fs::write(here.join(format!("file{index}")), bytes).expect("own directory");
        }
        let config = format!(
            "use chroot = no\nuid = 0\ngid = 0\n[files]\npath = {}\nread only = no\n",
            there.display()
        );
        let config = host.write("rsyncd.conf", config);
        let server = host
            .program("rsync")
            .words(&format!("--daemon --no-detach --address 127.0.0.1 --port {port} --config"))
            .arg(config)
            .start("rsyncd");
        host.wait_for_port(port);
        let url = format!("rsync://127.0.0.1:{port}/files/");
        transfer(host, &format!("{}/", here.display()), &url);
        // A file that has changed in its middle is sent as differences.
        let mut changed = fs::read(here.join("file39")).expect("own file");
        changed[300_000..300_100].fill(0);
        fs::write(here.join("file39"), changed).expect("own file");
        transfer(host, &format!("{}/", here.display()), &url);
        let back = host.path("back");
        transfer(host, &url, &format!("{}/", back.display()));
        drop(server);
        assert!(content(&here) == content(&back), "what came back is not what was sent");
    });
}
