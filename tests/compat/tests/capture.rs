//! Reads the output of `shunt capture` with tshark: conversations of unmodified programs, and a
//! transfer in which every byte must be present and right, or reported as missing.

use shunt_compat::{Finished, Host, Program, find_program, under_shunt};
use std::fs::{self, read_to_string};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// A running capture, and its file.
struct Capture {
    program: Program,
    file: PathBuf,
}

impl Capture {
    fn start(host: &Host, port: u16) -> Capture {
        let file = host.path("capture.pcapng");
        let program = shunt(host)
            .args(["capture", "--port", &port.to_string(), "--write"])
            .arg(&file)
            .arg("--broker")
            .arg(host.broker_socket())
            .stopped_by_interrupt()
            .start("capture");
        let deadline = Instant::now() + LIMIT;
        while !read_to_string(host.path("capture.stderr")).is_ok_and(|said| said.contains("capturing")) {
            assert!(program.is_running() && Instant::now() < deadline, "it does not capture");
            std::thread::sleep(Duration::from_millis(5));
        }
        Capture { program, file }
    }

    /// Ends the capture as Ctrl-C does. Returns the file, and the summary that was printed.
    fn stop(self) -> (PathBuf, String) {
        let Finished { status, stderr, .. } = self.program.stop();
        assert!(status.success(), "{stderr}");
        (self.file, stderr)
    }
}

fn shunt(host: &Host) -> shunt_compat::Launch<'_> {
    let tools = host.tools().expect("under shunt");
    host.program(tools.shunt.to_str().expect("a path of ours")).native()
}

/// Returns what tshark prints for a capture. It must accept the file.
fn tshark(file: &Path, arguments: &[&str]) -> String {
    let output = Command::new(find_program("tshark")).arg("-n").arg("-r").arg(file).args(arguments).output();
    let output = output.expect("tshark runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "tshark: {stderr}");
    String::from_utf8(output.stdout).expect("tshark prints text")
}

/// Returns the streams of a capture. For each it has the bytes of both ends; the end with the lower
/// port comes first.
fn streams(file: &Path) -> Vec<[Vec<u8>; 2]> {
    let mut streams: Vec<[Vec<u8>; 2]> = Vec::new();
    let fields = ["tcp.stream", "tcp.srcport", "tcp.dstport", "tcp.payload"];
    let mut arguments = vec!["-T", "fields"];
    arguments.extend(fields.iter().flat_map(|field| ["-e", field]));
    for line in tshark(file, &arguments).lines() {
        let words: Vec<_> = line.split('\t').collect();
        let [stream, from, to] = [0, 1, 2].map(|at: usize| words[at].parse::<usize>().expect("a number"));
        streams.resize_with(streams.len().max(stream + 1), Default::default);
        let bytes = words[3].as_bytes().chunks(2).map(|pair| {
            u8::from_str_radix(std::str::from_utf8(pair).expect("hexadecimal"), 16).expect("hexadecimal")
        });
        streams[stream][usize::from(from > to)].extend(bytes);
    }
    streams
}

/// Returns the packets with a wrong order or wrong numbers, in tshark's analysis.
fn complaints(file: &Path) -> String {
    tshark(file, &["-Y", "tcp.analysis.flags || _ws.malformed"])
}

#[test]
fn redis_is_followed_word_for_word() {
    under_shunt(LIMIT, |host| {
        let port = host.port();
        let _server = host
            .program("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .start("redis");
        host.wait_for_port(port);
        let capture = Capture::start(host, port);
        let lines: String = (0..1000).map(|index| format!("SET key:{index} {}\n", index * 7)).collect();
        host.program("redis-cli")
            .args(["-p", &port.to_string()])
            .input(host.write("commands", &lines))
            .run("redis-cli", LIMIT);
        let (file, said) = capture.stop();
        assert!(said.contains("of 1 connections; nothing was missed"), "{said}");

        let word = |word: &str| format!("${}\r\n{word}\r\n", word.len());
        let command = |index: usize| {
            format!(
                "*3\r\n{}{}{}",
                word("SET"),
                word(&format!("key:{index}")),
                word(&(index * 7).to_string())
            )
        };
        let asked: String = (0..1000).map(command).collect();
        let [[answers, questions]] = &streams(&file)[..] else { panic!("not one stream") };
        assert!(
            questions.len() > asked.len() / 2 && asked.as_bytes().ends_with(questions),
            "{}",
            questions.len()
        );
        assert!(answers.len() > 2500 && "+OK\r\n".repeat(1000).as_bytes().ends_with(answers));
        assert_eq!(complaints(&file), "");
        // `key:` in hexadecimal.
        let resp = format!("tcp.port=={port},resp");
        let decoded = tshark(&file, &["-d", &resp, "-T", "fields", "-e", "resp.bulk_string.value"]);
        assert!(decoded.matches("6b65793a").count() > 400, "{decoded}");
        // The comment names the programs.
        let comment = tshark(&file, &["-c", "1", "-T", "fields", "-e", "frame.comment"]);
        assert!(comment.contains("redis-server[") && comment.contains("redis-cli["), "{comment}");
    });
}

#[test]
fn http_is_followed_and_its_files_are_whole() {
    under_shunt(LIMIT, |host| {
        let (port, root) = (host.port(), host.path("www"));
        fs::create_dir(&root).expect("own directory");
        let content: Vec<u8> = (0..8000_u64).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        // All files together are smaller than three quarters of a ring, which is never missed,
        // however long the capture waits for a processor.
        let names: Vec<_> = (0..40).map(|index| format!("file{index:02}")).collect();
        for (index, name) in names.iter().enumerate() {
            fs::write(root.join(name), &content[index..500 + 180 * index]).expect("own directory");
        }
        let dir = host.path("nginx");
        fs::create_dir(&dir).expect("own directory");
        let dir = dir.display();
        let config = format!(
            "user root; daemon off; worker_processes 1; pid {dir}/pid; error_log {dir}/error.log warn;
             events {{ worker_connections 64; }}
             http {{
                 access_log off; default_type application/octet-stream; root {};
                 client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;
                 uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
                 server {{ listen 127.0.0.1:{port}; }}
             }}",
            root.display()
        );
        let config = host.write("nginx.conf", config);
        let _server = host
            .program("nginx")
            .arg("-e")
            .arg(format!("{dir}/error.log"))
            .arg("-c")
            .arg(config)
            .start("nginx");
        host.wait_for_port(port);
        let capture = Capture::start(host, port);
        let urls = names
            .iter()
            .flat_map(|name| ["-o".into(), "/dev/null".into(), format!("http://127.0.0.1:{port}/{name}")]);
        // One file every 25 ms, so that most are sent after the pairing.
        let curl = host.program("curl").args(["--silent", "--show-error", "--fail", "--rate", "40/s"]);
        curl.args(urls).run("curl", LIMIT);
        let (file, said) = capture.stop();
        assert!(said.contains("nothing was missed"), "{said}");

        let http = format!("tcp.port=={port},http");
        let asked =
            tshark(&file, &["-d", &http, "-Y", "http.request", "-T", "fields", "-e", "http.request.uri"]);
        let asked: Vec<_> =
            asked.trim_end().split(['\n', ',']).map(|uri| uri.trim_start_matches('/')).collect();
        assert!(
            asked.len() > 20 && names.iter().map(String::as_str).collect::<Vec<_>>().ends_with(&asked),
            "{asked:?}"
        );
        let [[answers, _]] = &streams(&file)[..] else { panic!("not one stream") };
        let bodies = bodies(answers);
        assert!(bodies.len() > 20, "{}", bodies.len());
        for (name, body) in names.iter().rev().zip(bodies.iter().rev()) {
            assert!(
                *body == fs::read(root.join(name)).expect("as written"),
                "{name} has {} bytes",
                body.len()
            );
        }
        let decoded = tshark(&file, &["-d", &http, "-T", "fields", "-e", "http.response.code"]);
        assert_eq!(decoded.matches("200").count(), bodies.len(), "{decoded}");
        assert_eq!(complaints(&file), "");
    });
}

/// Returns the bodies of the answers in a stream of HTTP, from the first that begins in it.
fn bodies(stream: &[u8]) -> Vec<&[u8]> {
    let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|window| window == what);
    let mut rest = &stream[find(stream, b"HTTP/1.1 200 OK\r\n").expect("an answer")..];
    let mut bodies = Vec::new();
    while !rest.is_empty() {
        let end = find(rest, b"\r\n\r\n").expect("the end of a head");
        let head = std::str::from_utf8(&rest[..end]).expect("a head is text");
        let len = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).expect("a length");
        let (body, next) = rest[end + 4..].split_at(len.parse().expect("a number"));
        bodies.push(body);
        rest = next;
    }
    bodies
}

#[test]
fn postgres_is_followed_query_by_query() {
    under_shunt(2 * LIMIT, |host| {
        const USER: &str = "postgres";
        let dir = host.path("data");
        fs::create_dir(&dir).expect("own directory");
        assert!(Command::new("chown").arg(USER).arg(&dir).status().expect("chown runs").success());
        let initdb = host.program("initdb").native().user(USER);
        initdb.words("--auth trust --no-sync --username postgres --pgdata").arg(&dir).run("initdb", LIMIT);
        let port = host.port();
        let _server = host
            .program("postgres")
            .user(USER)
            .arg("-D")
            .arg(&dir)
            .args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1"])
            .args(["-c", "unix_socket_directories=", "-c", "fsync=off"])
            .stopped_by_interrupt()
            .start("postgres");
        host.wait_for_port(port);
        let ready = || {
            let program = host.program("pg_isready").native().words(&format!("-h 127.0.0.1 -p {port}"));
            program.start("pg_isready").wait(LIMIT).success()
        };
        let deadline = Instant::now() + LIMIT;
        while !ready() {
            assert!(Instant::now() < deadline, "postgres did not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        let capture = Capture::start(host, port);
        let queries: Vec<_> = (0..400).map(|index| format!("select {index} + 1 as number{index};")).collect();
        let script = host.write("script.sql", queries.join("\n"));
        let psql =
            host.program("psql").user(USER).words(&format!("-h 127.0.0.1 -p {port} -U postgres -X -A -t -f"));
        psql.arg(script).arg("postgres").run("psql", LIMIT);
        let (file, said) = capture.stop();
        assert!(said.contains("nothing was missed"), "{said}");

        let postgres = format!("tcp.port=={port},pgsql");
        let of = |filter: &str, field: &str| {
            tshark(&file, &["-d", &postgres, "-Y", filter, "-T", "fields", "-E", "aggregator=|", "-e", field])
        };
        let asked = of("pgsql.query", "pgsql.query");
        let asked: Vec<_> = asked.lines().flat_map(|line| line.split('|')).collect();
        let wanted: Vec<_> = queries.iter().map(String::as_str).collect();
        assert!(asked.len() > 100 && wanted.ends_with(&asked), "{asked:?}");
        let columns = of("pgsql.col.name", "pgsql.col.name");
        let columns: Vec<_> = columns.lines().flat_map(|line| line.split('|')).collect();
        let named: Vec<_> = (0..400).map(|index| format!("number{index}")).collect();
        let named: Vec<_> = named.iter().map(String::as_str).collect();
        assert!(columns.len() > 100 && named.ends_with(&columns), "{columns:?}");
    });
}

#[test]
fn a_transfer_is_there_and_right_or_said_to_be_missing() {
    const TOTAL: u64 = 300_000_000;
    under_shunt(2 * LIMIT, |host| {
        let port = host.port();
        let capture = Capture::start(host, port);
        let receiver = host.write("receive.py", RECEIVE);
        let sender = host.write("send.py", SEND);
        let mut receiving = host.program("python3").arg(receiver).arg(port.to_string()).start("receive");
        receiving.wait_for_output("listening", LIMIT);
        host.program("python3").arg(sender).args([port.to_string(), TOTAL.to_string()]).run("send", LIMIT);
        assert!(receiving.wait(LIMIT).success());
        let (file, said) = capture.stop();

        let captured = Captured::read(&fs::read(&file).expect("it was written"));
        let comments = tshark(&file, &["-T", "fields", "-e", "frame.comment"]);
        assert_eq!(comments.lines().count(), captured.packets.len());
        let pattern = |at: u64| ((at % 1_000_003).wrapping_mul(2_654_435_761) >> 13) as u8;
        let (mut bytes, mut reached, mut missed) = (0, None, 0);
        // The end of the stream is TOTAL bytes after its beginning.
        let end = captured.packets.iter().find(|packet| packet.is_end && packet.to == port).expect("an end");
        for (packet, comment) in captured.packets.iter().zip(comments.lines()) {
            if packet.to != port {
                continue;
            }
            let at = TOTAL - u64::from(end.sequence.wrapping_sub(packet.sequence));
            let gap = gap_before(comment);
            missed += gap;
            // Only the first packet shows where the lane begins in the stream.
            assert_eq!(reached.unwrap_or(at - gap) + gap, at, "{comment}");
            reached = Some(at + packet.bytes.len() as u64);
            bytes += packet.bytes.len() as u64;
            let wrong = packet.bytes.iter().zip(at..).find(|(byte, at)| **byte != pattern(*at));
            assert_eq!(wrong, None, "in the packet at {at}");
        }
        assert_eq!(reached, Some(TOTAL));
        assert!(bytes + missed > TOTAL / 2, "{bytes} and {missed} of {TOTAL}");
        let counted = format!("{missed} bytes were missed");
        assert!(said.contains(if missed == 0 { "nothing was missed" } else { &counted }), "{missed}: {said}");
        assert!(said.contains(&format!("{} packets", captured.packets.len())), "{said}");
        println!("{said}");
    });
}

/// Returns the number of missing bytes before a packet, from its comment.
fn gap_before(comment: &str) -> u64 {
    let words = comment.split("; ").find_map(|part| part.strip_suffix(" bytes before this were missed"));
    words.map_or(0, |count| count.parse().expect("a number"))
}

/// The packets of a capture, parsed according to the format's specification.
struct Captured {
    packets: Vec<Packet>,
}

struct Packet {
    to: u16,
    sequence: u32,
    is_end: bool,
    bytes: Vec<u8>,
}

impl Captured {
    fn read(file: &[u8]) -> Captured {
        let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four bytes"));
        let (mut at, mut packets) = (0, Vec::new());
        while at < file.len() {
            if word(at) == 6 {
                let packet = &file[at + 28..at + 28 + word(at + 20) as usize];
                let tcp = &packet[20..];
                packets.push(Packet {
                    to: u16::from_be_bytes([tcp[2], tcp[3]]),
                    sequence: u32::from_be_bytes(tcp[4..8].try_into().expect("four bytes")),
                    is_end: tcp[13] & 1 != 0,
                    bytes: tcp[20..].to_vec(),
                });
            }
            at += word(at + 4) as usize;
        }
        Captured { packets }
    }
}

const SEND: &str = "
import socket, sys
port, total = map(int, sys.argv[1:])
pattern = bytes((at * 2654435761 >> 13) & 0xff for at in range(1000003))
s = socket.create_connection(('127.0.0.1', port))
whole, rest = divmod(total, len(pattern))
for at in range(0, 100000, 1000):
    s.sendall(pattern[at:at + 1000])
s.sendall(pattern[100000:])
for _ in range(whole - 1):
    s.sendall(pattern)
s.sendall(pattern[:rest])
s.shutdown(socket.SHUT_WR)
assert s.recv(1) == b'.'
";

const RECEIVE: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
s, _ = listener.accept()
buffer = bytearray(1 << 20)
while s.recv_into(buffer):
    pass
s.sendall(b'.')
";

#[test]
fn a_capture_is_read_live_and_ends_by_itself() {
    under_shunt(LIMIT, |host| {
        let port = host.port();
        let _server = host
            .program("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .start("redis");
        host.wait_for_port(port);
        let _load = host
            .program("redis-benchmark")
            .words(&format!("-h 127.0.0.1 -p {port} -t set -c 4 -n 100000000 -q"))
            .start("load");
        // Let connections exist before the capture starts.
        std::thread::sleep(Duration::from_millis(500));
        let tools = host.tools().expect("under shunt");
        let line = format!(
            "'{}' capture --program redis-server --count 500 --snaplen 64 --broker '{}' | tshark -n -r - -T fields -e ip.proto -e frame.cap_len",
            tools.shunt.display(),
            host.broker_socket().display()
        );
        let output = Command::new("sh").args(["-c", &line]).output().expect("sh runs");
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(stdout.lines().count(), 500, "{stderr}");
        assert!(stderr.contains("500 packets") && stderr.contains("capturing all"), "{stderr}");
        for line in stdout.lines() {
            let (protocol, len) = line.split_once('\t').expect("two fields");
            assert!(protocol == "6" && len.parse::<usize>().is_ok_and(|len| len <= 64), "{line}");
        }
    });
}
