//! Two sites as network namespaces: a client and a relay in one, a relay and a server in the other.
//! The relays' hosts are the routers between client and server, also without relays.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use shunt_netns::Net;
use shunt_wan::{Config, Link, Tun};
use tempfile::TempDir;

pub(crate) const SERVER: &str = "10.3.0.2";
pub(crate) const SERVER6: &str = "fd00:3::2";

pub(crate) struct Lab {
    pub(crate) client: Net,
    pub(crate) edge: Net,
    pub(crate) exit: Net,
    pub(crate) server: Net,
    directory: TempDir,
    running: Vec<(Site, Child)>,
    /// The emulated link between the relays. `None` if a wire connects them.
    _far: Option<Link>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    Edge,
    Exit,
}

impl Site {
    fn name(self) -> &'static str {
        match self {
            Site::Edge => "edge",
            Site::Exit => "exit",
        }
    }
}

impl Lab {
    /// Builds wires, addresses, routes and a key. No relay runs yet.
    pub(crate) fn build() -> Lab {
        Lab::build_over(None)
    }

    /// Builds the lab with an emulated link between the relays.
    pub(crate) fn build_over(far: Option<Config>) -> Lab {
        let [client, edge, exit, server] = [(); 4].map(|()| Net::new());
        let mut link = None;
        let wires = [(&client, "1", &edge), (&edge, "2", &exit), (&exit, "3", &server)];
        for (number, (left, net, right)) in wires.into_iter().enumerate() {
            // A router has .1 on its outer link. On the link between the routers, the edge has .1.
            let (near, away) = if number == 0 { (2, 1) } else { (1, 2) };
            match far.filter(|_| number == 1) {
                Some(config) => {
                    let [one, two] = [(left, "right"), (right, "left")]
                        .map(|(net, name)| net.inside(|| Tun::open(name, 1_500)).unwrap());
                    link = Some(Link::start(config, one, two).unwrap());
                    left.words(&format!("ip address add 10.{net}.0.{near}/24 dev right"));
                    right.words(&format!("ip address add 10.{net}.0.{away}/24 dev left"));
                }
                None => {
                    let ends = [near, away].map(|host| format!("10.{net}.0.{host}/24"));
                    Net::connect((left, "right", &ends[0]), (right, "left", &ends[1]));
                }
            }
            left.words(&format!("ip address add fd00:{net}::{near}/64 dev right nodad"));
            right.words(&format!("ip address add fd00:{net}::{away}/64 dev left nodad"));
        }
        for (net, gateways) in [
            (&client, vec!["default via 10.1.0.1", "default via fd00:1::1"]),
            (&server, vec!["default via 10.3.0.1", "default via fd00:3::1"]),
            (&edge, vec!["10.3.0.0/24 via 10.2.0.2", "fd00:3::/64 via fd00:2::2"]),
            (&exit, vec!["10.1.0.0/24 via 10.2.0.1", "fd00:1::/64 via fd00:2::1"]),
        ] {
            for gateway in gateways {
                net.words(&format!("ip route add {gateway}"));
            }
        }
        for router in [&edge, &exit] {
            router.inside(|| {
                fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
                fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
            });
        }
        let directory = tempfile::tempdir().unwrap();
        let lab = Lab { client, edge, exit, server, directory, running: Vec::new(), _far: link };
        assert!(shunt(&["relay", "new-key", lab.path("key").to_str().unwrap()]).status.success());
        lab
    }

    /// Starts both relays. All connections to the server are intercepted, and go through the exit.
    /// `route` contains further keys of the route.
    pub(crate) fn with_relays(route: &str) -> Lab {
        let mut lab = Lab::build();
        lab.start(Site::Exit, EXIT);
        lab.start(Site::Edge, &edge(route));
        lab
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Disables IPv6 on the relays' hosts.
    pub(crate) fn disable_ipv6(&self) {
        for relay in [&self.edge, &self.exit] {
            relay.inside(|| fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap());
        }
    }

    /// Starts a relay with this configuration. Its control socket is added, and KEY is replaced by
    /// the path of the key.
    pub(crate) fn start(&mut self, site: Site, config: &str) {
        self.start_by(site, config, Command::new(env!("CARGO_BIN_EXE_shunt")));
    }

    /// Starts a relay with another command, to which the words after `shunt` are added.
    pub(crate) fn start_by(&mut self, site: Site, config: &str, mut command: Command) {
        self.write_config(site, config);
        let net = if site == Site::Edge { &self.edge } else { &self.exit };
        let log = fs::File::create(self.path(&format!("{}.log", site.name()))).unwrap();
        command
            .arg("relay")
            .arg("--config")
            .arg(self.config(site))
            .env("SHUNT_LOG", "info,shunt_relay=debug");
        let child = net.inside(|| command.stdin(Stdio::null()).stderr(log).spawn().unwrap());
        self.running.push((site, child));
        await_until(|| self.ask(site, &["status"]).status.success(), || self.log(site));
    }

    pub(crate) fn write_config(&self, site: Site, config: &str) {
        let key = self.path("key");
        let control = self.control(site);
        let text = config.replace("KEY", key.to_str().unwrap());
        fs::write(self.config(site), format!("control = '{}'\n{text}", control.display())).unwrap();
    }

    /// Kills a relay, like a crash.
    pub(crate) fn kill(&mut self, site: Site) {
        let index = self.running.iter().position(|(running, _)| *running == site).expect("it runs");
        let (_, mut child) = self.running.remove(index);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits until a relay ends by itself.
    pub(crate) fn await_end(&mut self, site: Site) {
        let index = self.running.iter().position(|(running, _)| *running == site).expect("it runs");
        let (_, mut child) = self.running.remove(index);
        await_until(|| child.try_wait().unwrap().is_some(), || "it goes on".to_owned());
    }

    /// Runs `shunt relay WORDS` for a relay.
    pub(crate) fn ask(&self, site: Site, words: &[&str]) -> Output {
        let control = self.control(site);
        let mut all = vec!["relay", words[0], "--control", control.to_str().unwrap()];
        all.extend(&words[1..]);
        shunt(&all)
    }

    pub(crate) fn status(&self, site: Site) -> serde_json::Value {
        let output = self.ask(site, &["status", "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the sum of the counters whose names begin with `name` and contain `part`.
    pub(crate) fn counter(&self, site: Site, name: &str, part: &str) -> u64 {
        let status = self.status(site);
        let counters = status["counters"].as_object().unwrap();
        let of = |(key, _): &(&String, &serde_json::Value)| {
            key.starts_with(&format!("shunt_relay_{name}")) && key.contains(part)
        };
        counters.iter().filter(of).map(|(_, value)| value.as_u64().unwrap()).sum()
    }

    /// Waits for a counter's value. A connection is counted when all of it has ended, shortly after
    /// its ends have seen that.
    pub(crate) fn await_counter(&self, site: Site, name: &str, part: &str, count: u64) {
        let complaint = || format!("{} {name}\n{}", self.counter(site, name, part), self.log(site));
        await_until(|| self.counter(site, name, part) == count, complaint);
    }

    pub(crate) fn pid(&self, site: Site) -> u32 {
        self.running.iter().find(|(running, _)| *running == site).expect("it runs").1.id()
    }

    pub(crate) fn log(&self, site: Site) -> String {
        fs::read_to_string(self.path(&format!("{}.log", site.name()))).unwrap_or_default()
    }

    pub(crate) fn control(&self, site: Site) -> PathBuf {
        self.path(&format!("{}.sock", site.name()))
    }

    fn config(&self, site: Site) -> PathBuf {
        self.path(&format!("{}.toml", site.name()))
    }

    pub(crate) fn listen(&self, address: &str) -> TcpListener {
        let listener = self.server.inside(|| TcpListener::bind(address).unwrap());
        // The time limit also applies to accept.
        socket2::SockRef::from(&listener).set_read_timeout(Some(LIMIT)).unwrap();
        listener
    }

    pub(crate) fn connect(&self, address: impl Into<SocketAddr>) -> std::io::Result<TcpStream> {
        let address = address.into();
        self.client.inside(|| TcpStream::connect_timeout(&address, LIMIT)).map(with_limits)
    }

    /// Returns a connection from the client, and the server's end of it.
    pub(crate) fn pair(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let client = self.connect(listener.local_addr().unwrap()).unwrap();
        (client, with_limits(listener.accept().unwrap().0))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for (site, mut child) in std::mem::take(&mut self.running) {
            if std::thread::panicking() {
                eprintln!("--- {site:?}\n{}", self.log(site));
            }
            // A relay that is killed leaves its control group to its successor. These relays have
            // none.
            let _ = kill_process(Pid::from_child(&child), Signal::TERM);
            let deadline = Instant::now() + LIMIT;
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(crate) const EXIT: &str = "name = 'exit'\n[intercept]\n[accept]\nlisten = ['10.2.0.2:7440']\n\
    [[accept.peer]]\nname = 'edge'\nkey = 'KEY'\n\
    targets = ['10.3.0.0/24:*', '[fd00:3::]/64:*']\nturbo = true\nbandwidth = '1gbit'\nrtt = '20ms'\n";

pub(crate) fn edge(route: &str) -> String {
    format!(
        "name = 'edge'\n[intercept]\ninterfaces = ['left']\n\
         [[peer]]\nname = 'exit'\naddress = '10.2.0.2:7440'\nkey = 'KEY'\n\
         turbo = true\nbandwidth = '1gbit'\nrtt = '20ms'\npool = {{ low = 4, high = 64 }}\n\
         [[route]]\nto = ['10.3.0.0/24', 'fd00:3::/64']\nvia = 'exit'\n{route}\n"
    )
}

/// The longest time that a test waits.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn with_limits(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

pub(crate) fn shunt(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shunt")).args(words).output().unwrap()
}

pub(crate) fn await_until(mut done: impl FnMut() -> bool, complaint: impl Fn() -> String) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "it does not come: {}", complaint());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns bytes without a repeating pattern, so that lost, repeated or moved bytes are detected.
pub(crate) fn sample(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Sends the bytes, and then ends the stream.
pub(crate) fn send(mut stream: &TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(bytes)?;
    stream.shutdown(std::net::Shutdown::Write)
}

pub(crate) fn receive(mut stream: &TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    Ok(bytes)
}
