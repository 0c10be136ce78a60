//! Tests answers of the kernel to messages that it receives in several pieces. Needs root.

#[allow(dead_code, reason = "the service has no backends")]
mod common;
#[path = "common/random.rs"]
mod random;

use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::net::TcpStream;

use common::{ENGINES, Serving};
use random::Random;
use rustix::fs::sendfile;
use rustix::net::sockopt::set_tcp_cork;
use shunt_netns::Net;
use shunt_serve::engine::Engine;

/// A client of the line counter, which answers `NAME ? ANYTHING`.
struct Client {
    name: String,
    stream: TcpStream,
    reader: BufReader<TcpStream>,
    lines: u64,
}

impl Client {
    fn ask(&mut self, padding: usize) {
        let line = format!("{} ? {}\n", self.name, "x".repeat(padding));
        self.stream.write_all(line.as_bytes()).unwrap();
        self.lines += 1;
    }

    /// Sends a message whose parts are on so many pages, in one segment.
    fn ask_from_pages(&mut self, pages: usize, each: usize) {
        const DISTANCE: u64 = 8192;
        let line = format!("{} ? {}\n", self.name, "x".repeat(pages * each - self.name.len() - 4));
        let mut file = tempfile::tempfile().unwrap();
        for (page, part) in line.as_bytes().chunks(each).enumerate() {
            file.seek(SeekFrom::Start(page as u64 * DISTANCE)).unwrap();
            file.write_all(part).unwrap();
        }
        set_tcp_cork(&self.stream, true).unwrap();
        for page in 0..pages {
            let mut offset = page as u64 * DISTANCE;
            assert_eq!(sendfile(&self.stream, &file, Some(&mut offset), each), Ok(each));
        }
        set_tcp_cork(&self.stream, false).unwrap();
        self.lines += 1;
    }

    fn check(&mut self, padding: usize) {
        let (mut line, lines) = (String::new(), self.lines);
        let read = self.reader.read_line(&mut line);
        assert!(read.is_ok(), "{}: {read:?} after {padding} bytes, line {lines}", self.name);
        assert_eq!(line, format!("{lines} lines, this is {lines}\n"), "after {padding} bytes");
    }
}

#[test]
fn an_answer_replaces_all_pieces_of_a_message() {
    for engine in ENGINES {
        let serving = Serving::start(Net::new(), "line-counter", engine, &[]);
        // The messages of several connections share the pages from which they are sent, so that some
        // continue on the next page.
        let mut clients: Vec<Client> = (0..8)
            .map(|number| {
                let stream = serving.connect();
                let reader = BufReader::new(stream.try_clone().unwrap());
                Client { name: format!("client{number}"), stream, reader, lines: 0 }
            })
            .collect();
        let mut random = Random(engine as u64 + 1);
        for round in 0..400 {
            let most = [20, 200, 2000, 4000, 20_000][round % 5];
            let paddings: Vec<usize> = clients.iter().map(|_| random.below(most) as usize).collect();
            clients.iter_mut().zip(&paddings).for_each(|(client, padding)| client.ask(*padding));
            clients.iter_mut().zip(&paddings).for_each(|(client, padding)| client.check(*padding));
        }
        for round in 0..200 {
            let (pages, each) = (2 + round % 12, 20 + round);
            clients.iter_mut().for_each(|client| client.ask_from_pages(pages, each));
            clients.iter_mut().for_each(|client| client.check(pages * each));
        }
        let status = serving.status();
        if engine == Engine::Kernel {
            assert!(status["kernel"]["messages"].as_u64().unwrap() > 1000, "{status:#}");
        }
        assert_eq!(status["drops"], serde_json::json!({}), "{status:#}");
    }
}
