//! Programs that others wrote, as clients and backends of the proxy.

mod common;

use std::fs;
use std::process::{Child, Command, Stdio};

use common::{Lab, PROXY, backends, content, wait_until};

/// A program that is killed at the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(lab: &Lab, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", lab.net.path().display())).arg(program).stdin(Stdio::null());
    command
}

fn output(command: &mut Command) -> String {
    let output = command.output().expect("it is installed");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {out}{error}");
    out.into_owned()
}

/// Starts nginx with a file and a directory for uploads.
fn nginx(lab: &Lab, file: &[u8]) -> Running {
    let own = lab.directory.path();
    fs::create_dir(own.join("www")).unwrap();
    fs::write(own.join("www/file"), file).unwrap();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {}/{name};", own.display()))
        .concat();
    let text = format!(
        "user root; daemon off; master_process off; pid {0}/pid; error_log {0}/error.log; events {{}}
         http {{ access_log off; {paths} client_max_body_size 0; chunked_transfer_encoding on;
         server {{ listen 127.0.0.1:9001; root {0}/www; location /up/ {{ dav_methods PUT; alias {0}/www/; }} }} }}",
        own.display()
    );
    fs::write(own.join("nginx.conf"), text).unwrap();
    let mut command = command(lab, "nginx");
    command.arg("-e").arg(own.join("error.log")).arg("-c").arg(own.join("nginx.conf"));
    let running = Running(command.stdout(Stdio::null()).spawn().expect("nginx is installed"));
    wait_until("nginx listens", || lab.net.inside(|| std::net::TcpStream::connect("127.0.0.1:9001")).is_ok());
    running
}

#[test]
fn curl_python_and_wrk_are_served_from_nginx() {
    let mut lab = Lab::new();
    let file = content(3 << 20);
    let _nginx = nginx(&lab, &file);
    lab.start(&backends(&[9001]));
    let url = format!("http://{PROXY}");
    let got = lab.directory.path().join("got");
    let script = "
import http.client, sys
connection = http.client.HTTPConnection('127.0.0.1', 8080)
wanted = open(sys.argv[1], 'rb').read()
for number in range(5):
    connection.request('GET', '/file')
    assert connection.getresponse().read() == wanted
    connection.request('HEAD', '/file')
    reply = connection.getresponse()
    assert (reply.status, reply.read(), reply.getheader('Content-Length')) == (200, b'', str(len(wanted)))
    connection.request('GET', '/file', headers={'Range': 'bytes=10-19'})
    reply = connection.getresponse()
    assert (reply.status, reply.read()) == (206, wanted[10:20])
    connection.request('POST', '/file', body=(part for part in [b'a' * 1000] * 300), encode_chunked=True,
        headers={'Transfer-Encoding': 'chunked'})
    reply = connection.getresponse()
    reply.read()
    assert reply.status == 405
    connection.close()
";
    output(
        command(&lab, "curl")
            .args(["-sSf", "-o"])
            .arg(&got)
            .args([&format!("{url}/file"), "--next", "-sSf", "-o"])
            .arg(&got)
            .arg(format!("{url}/file")),
    );
    assert!(fs::read(&got).unwrap() == file);
    // curl waits for the reply 100 before a long upload.
    output(
        command(&lab, "curl")
            .args(["-sSf", "-H", "Expect: 100-continue", "-T"])
            .arg(&got)
            .arg(format!("{url}/up/one")),
    );
    assert!(fs::read(lab.directory.path().join("www/one")).unwrap() == file);
    output(command(&lab, "/usr/bin/python3").args(["-c", script]).arg(&got));
    let text = output(command(&lab, "wrk").args(["-t1", "-c20", "-d1", &format!("{url}/file")]));
    assert!(!text.contains("Non-2xx") && !text.contains("Socket errors"), "{text}");
    lab.stop();
}

#[test]
fn websocket_echo_works_for_text_pings_and_long_messages() {
    let mut lab = Lab::new();
    let server = "
import asyncio, websockets
async def echo(socket, path=None):
    async for message in socket:
        await socket.send(message)
async def main():
    async with websockets.serve(echo, '127.0.0.1', 9001, max_size=None):
        print('ready', flush=True)
        await asyncio.Future()
asyncio.run(main())
";
    let client = "
import asyncio, websockets
async def main():
    async with websockets.connect('ws://127.0.0.1:8080/chat', max_size=None) as socket:
        for message in ['a', 'b' * 70000, b'c' * 3000000, '']:
            await socket.send(message)
            assert await socket.recv() == message
        await (await socket.ping())
asyncio.run(main())
";
    let mut command_of_server = command(&lab, "/usr/bin/python3");
    let _server = Running(command_of_server.args(["-c", server]).stdout(Stdio::null()).spawn().unwrap());
    wait_until("the server listens", || {
        lab.net.inside(|| std::net::TcpStream::connect("127.0.0.1:9001")).is_ok()
    });
    lab.start(&backends(&[9001]));
    output(command(&lab, "/usr/bin/python3").args(["-c", client]));
    assert_eq!(lab.status()["upgrades"], 1);
    lab.stop();
}
