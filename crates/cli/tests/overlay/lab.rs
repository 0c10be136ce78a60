//! Two hosts with a container each, as network namespaces.
//!
//! A wire connects the hosts, and a VXLAN runs over it. On each host, a bridge joins the VXLAN and
//! the container. The namespaces have no names, and all processes in them end with the lab.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use shunt_netns::Net;
use tempfile::TempDir;

/// The addresses of the containers.
pub(crate) const CLIENT: &str = "10.50.1.2";
pub(crate) const SERVER: &str = "10.50.2.2";
/// The IPv6 addresses of the containers.
pub(crate) const CLIENT_IPV6: &str = "fd00:50:1::2";
pub(crate) const SERVER_IPV6: &str = "fd00:50:2::2";

/// A Python script that connects to two ports of the server, checks the answer, and prints both
/// results.
pub(crate) const ASK_TWICE: &str = "
import errno, socket
def ask(port):
    with socket.socket() as s:
        error = s.connect_ex(('10.50.2.2', port))
        if error:
            return errno.errorcode[error]
        # Labels and policies may change meanwhile.
        try:
            s.sendall(b'name 5\\n12345')
            answer = b''
            while not answer.endswith(b'12345'):
                part = s.recv(1000)
                if not part:
                    return 'ended'
                answer += part
        except OSError as error:
            return errno.errorcode[error.errno]
        return 'connected'
print(*map(ask, [9000, 9001]))
";

/// Returns a Python script with a `page` that userfaultfd watches. The kernel waits when it touches
/// the page, until `faults` is closed. A call that sends from it holds the lock of its socket
/// meanwhile.
pub(crate) fn held_page(script: &str) -> String {
    const PAGE: &str = "
import ctypes, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), 3, 0x22, -1, ctypes.c_long(0))
faults = libc.syscall(323, 0)
assert faults >= 0, ctypes.get_errno()
api, register = ctypes.create_string_buffer(struct.pack('QQQ', 0xAA, 0, 0)), ctypes.create_string_buffer(struct.pack('QQQQ', page, 4096, 1, 0))
assert libc.ioctl(faults, ctypes.c_ulong(0xc018aa3f), api) == 0
assert libc.ioctl(faults, ctypes.c_ulong(0xc020aa00), register) == 0
";
    [PAGE, script].concat()
}

/// A host, and the container on it.
pub(crate) struct Host {
    pub(crate) name: &'static str,
    pub(crate) net: Net,
    pub(crate) container: Net,
    router: Option<Child>,
}

pub(crate) struct Lab {
    /// The hosts of the client and of the server.
    pub(crate) hosts: [Host; 2],
    /// How long one end waits for the other's router and program. It is long, so that the tests
    /// also pass on a busy machine.
    pub(crate) patience_ms: u32,
    /// The addresses of the overlay, as in the configuration.
    pub(crate) prefixes: String,
    /// The addresses of the routers.
    pub(crate) routers: [&'static str; 2],
    /// The number of each router's ports.
    pub(crate) ports: u16,
    /// How long a non-blocking connect is held.
    pub(crate) hold_ms: u32,
    /// Whether brief connections are moved too, although moving them does not pay. Most tests have
    /// brief ones.
    pub(crate) moves_brief: bool,
    /// Additional lines of each router's configuration.
    pub(crate) configuration: String,
    /// The overlay's addresses on each host, as in the configuration.
    pub(crate) containers: [String; 2],
    /// Whether each host's configuration has the other host too.
    pub(crate) names_others: bool,
    /// The command `shunt` that routers and programs are started with.
    pub(crate) program: PathBuf,
    directory: TempDir,
    running: Vec<Child>,
}

/// The way of routed connections from host to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    /// A VXLAN whose device has an address of the overlay, as that of flannel.
    Vxlan,
    /// The hosts' own network. The source of masqueraded connections is the host's own address.
    Direct,
}

pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;

impl Lab {
    /// Returns the results of connecting to the two ports of [`ASK_TWICE`] from the client.
    pub(crate) fn ask_twice(&self) -> String {
        let output = self.output(A, self.command(A, true, "python3").args(["-c", ASK_TWICE]));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// Runs openssl in the lab's directory.
    pub(crate) fn openssl(&self, words: &str) {
        let output =
            Command::new("openssl").args(words.split(' ')).current_dir(self.path("")).output().unwrap();
        assert!(output.status.success(), "openssl {words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Makes a certificate authority, and certificates for a server and for routers: one with a
    /// CommonName, and one without.
    pub(crate) fn make_certificates(&self) {
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        self.openssl(&format!("req -x509 {key} -keyout ca.key -out ca.crt -subj /CN=ca -days 2"));
        for (name, subject, part) in [
            ("server", "/CN=server", "subjectAltName=IP:192.168.77.1"),
            ("router", "/CN=router", "extendedKeyUsage=clientAuth"),
            ("nameless", "/O=shunt", "extendedKeyUsage=clientAuth"),
        ] {
            self.openssl(&format!(
                "req {key} -keyout {name}.key -out {name}.csr -subj {subject} -addext {part}"
            ));
            self.openssl(&format!(
                "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -copy_extensions copy -days 2 -out {name}.crt"
            ));
        }
    }

    /// Builds wires and bridges. No router runs yet.
    pub(crate) fn build() -> Lab {
        let hosts = [(A, "a", CLIENT), (B, "b", SERVER)].map(|(_, name, _)| Host {
            name,
            net: Net::new(),
            container: Net::new(),
            router: None,
        });
        Net::connect((&hosts[A].net, "wire", "192.168.77.1/24"), (&hosts[B].net, "wire", "192.168.77.2/24"));
        for (at, container, other_family) in [(A, CLIENT, CLIENT_IPV6), (B, SERVER, SERVER_IPV6)] {
            let (host, own, other) = (&hosts[at], at + 1, 2 - at);
            let net = &host.net;
            net.words("ip link add bridge type bridge");
            net.words(&format!(
                "ip link add vxlan type vxlan id 42 local 192.168.77.{own} remote 192.168.77.{other} dstport 4789 dev wire"
            ));
            net.words("ip link add port type veth peer name shunt-peer");
            net.words(&format!("ip link set shunt-peer netns {}", host.container.path().display()));
            for device in ["vxlan", "port"] {
                net.words(&format!("ip link set {device} master bridge up"));
            }
            net.words("ip link set bridge up");
            host.container.words("ip link set shunt-peer name eth0 mtu 1450");
            host.container.words(&format!("ip address add {container}/16 dev eth0"));
            host.container.words(&format!("ip address add {other_family}/32 dev eth0 nodad"));
            host.container.words("ip link set eth0 up");
            net.words(&format!("ip address add 2001:db8:77::{own}/64 dev wire nodad"));
        }
        let directory = tempfile::tempdir().unwrap();
        // Servers whose workers change their user read files in this directory.
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let lab = Lab {
            hosts,
            patience_ms: 5000,
            prefixes: "'10.50.0.0/16'".to_owned(),
            routers: ["192.168.77.1:7450", "192.168.77.2:7450"],
            ports: 1,
            hold_ms: 5000,
            moves_brief: true,
            configuration: String::new(),
            containers: ["'10.50.1.0/24'", "'10.50.2.0/24'"].map(str::to_owned),
            names_others: true,
            program: env!("CARGO_BIN_EXE_shunt").into(),
            directory,
            running: Vec::new(),
        };
        lab.make_key("key");
        lab.await_overlay();
        lab
    }

    /// Builds the lab and starts both routers.
    pub(crate) fn with_routers() -> Lab {
        let mut lab = Lab::build();
        lab.start(A);
        lab.start(B);
        lab
    }

    /// Builds a lab whose overlay has both address families, and starts both routers. The routers
    /// use IPv6 addresses if `hosts_are_ipv6` is set.
    pub(crate) fn of_both_families(hosts_are_ipv6: bool) -> Lab {
        let mut lab = Lab::with_both_prefixes(hosts_are_ipv6);
        lab.start(A);
        lab.start(B);
        lab
    }

    /// Builds a lab whose overlay has both address families. No router runs yet.
    pub(crate) fn with_both_prefixes(hosts_are_ipv6: bool) -> Lab {
        let mut lab = Lab::build();
        lab.prefixes += ", 'fd00:50::/32'";
        for (at, prefix) in [(A, "'fd00:50:1::/48'"), (B, "'fd00:50:2::/48'")] {
            lab.containers[at] += &format!(", {prefix}");
        }
        if hosts_are_ipv6 {
            lab.routers = ["[2001:db8:77::1]:7450", "[2001:db8:77::2]:7450"];
        }
        lab
    }

    /// Replaces the common bridge by routes through the hosts, so that all connections pass netfilter
    /// there. `more` are further containers of host b.
    pub(crate) fn route(&self, wire: Wire, more: &[(&Net, &str)]) {
        for (at, own, there) in [(A, CLIENT, 2), (B, SERVER, 1)] {
            let (host, third) = (&self.hosts[at], at + 1);
            host.net.inside(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
            host.net.words(&format!("ip address add 10.50.{third}.1/24 dev bridge"));
            let more = more.iter().filter(|_| at == B).copied();
            for (container, own) in more.chain([(&host.container, own)]) {
                container.words(&format!("ip address del {own}/16 dev eth0"));
                container.words(&format!("ip address add {own}/24 dev eth0"));
                container.words(&format!("ip route add default via 10.50.{third}.1"));
            }
            match wire {
                Wire::Vxlan => {
                    host.net.words("ip link set vxlan nomaster");
                    host.net.words(&format!("ip address add 10.50.{third}.0/32 dev vxlan"));
                    let route = format!("10.50.{there}.0/24 via 10.50.{there}.0 dev vxlan onlink");
                    host.net.words(&format!("ip route add {route}"));
                }
                Wire::Direct => {
                    host.net.words(&format!("ip route add 10.50.{there}.0/24 via 192.168.77.{there}"));
                }
            }
        }
    }

    /// Waits until the bridges forward packets.
    fn await_overlay(&self) {
        let mut ping = Command::new("ping");
        ping.args(["-c", "1", "-W", "1", SERVER]).stdout(Stdio::null());
        await_until(|| self.hosts[A].container.inside(|| ping.status()).unwrap().success(), String::new);
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn socket(&self, host: usize) -> PathBuf {
        self.path(&format!("{}-router.sock", self.hosts[host].name))
    }

    pub(crate) fn make_key(&self, name: &str) {
        assert!(shunt(&["overlay", "new-key", self.path(name).to_str().unwrap()]).status.success());
    }

    /// Starts a host's router.
    pub(crate) fn start(&mut self, host: usize) {
        self.start_with(host, "key");
    }

    /// Starts a host's router with the key `key`.
    pub(crate) fn start_with(&mut self, host: usize, key: &str) {
        let name = self.hosts[host].name;
        let config = self.path(&format!("{name}.toml"));
        let hosts = [A, B].into_iter().filter(|other| self.names_others || *other == host).map(|at| {
            format!(
                "[[host]]\nname = '{}'\naddress = '{}'\nports = {}\ncontainers = [{}]\n",
                self.hosts[at].name, self.routers[at], self.ports, self.containers[at],
            )
        });
        let hosts: String = hosts.collect();
        let text = format!(
            "name = '{name}'\nkey = '{key}'\nprefixes = [{prefixes}]\nask-ms = {patience}\npatience-ms = {patience}\nhold-ms = {hold}\n\
             socket = '{socket}'\ncontrol = '{control}'\nmove-brief = {brief}\n{more}\n{hosts}",
            prefixes = self.prefixes,
            key = self.path(key).display(),
            patience = self.patience_ms,
            hold = self.hold_ms,
            brief = self.moves_brief,
            more = self.configuration,
            socket = self.socket(host).display(),
            control = self.control(host).display(),
        );
        fs::write(&config, text).unwrap();
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log_path(host)).unwrap();
        let mut command = Command::new("setpriv");
        command
            .args(["--no-new-privs", &format!("--bounding-set={}", capabilities())])
            .arg(&self.program)
            .args(["overlay", "router", "--config"])
            .arg(config)
            .env("SHUNT_LOG", "info,shunt_overlay=debug");
        let mut command = bound(&self.hosts[host].net, &command);
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        self.hosts[host].router = Some(child);
        let is_there =
            || shunt(&["overlay", "status", "--control", self.control(host).to_str().unwrap()]).status;
        await_until(|| is_there().success(), || self.log(host));
    }

    /// Kills a host's router, like a crash.
    pub(crate) fn kill(&mut self, host: usize) {
        let mut router = self.hosts[host].router.take().expect("it runs");
        router.kill().unwrap();
        router.wait().unwrap();
    }

    /// Ends a host's router, as an update does.
    pub(crate) fn end_router(&mut self, host: usize) {
        end(&mut self.hosts[host].router.take().expect("it runs"));
    }

    /// Puts a copy of the command, another file, at the path of the lab's own command.
    pub(crate) fn install(&mut self) {
        self.install_from(env!("CARGO_BIN_EXE_shunt"));
    }

    /// Installs the command of another version.
    pub(crate) fn install_from(&mut self, command: &str) {
        let (new, program) = (self.path("shunt-new"), self.path("shunt"));
        fs::copy(command, &new).unwrap();
        fs::rename(&new, &program).unwrap();
        self.program = program;
    }

    /// Returns the control group that a host's router has created.
    pub(crate) fn group(&self, host: usize) -> PathBuf {
        let router = self.hosts[host].router.as_ref().expect("it runs").id();
        let groups = fs::read_to_string(format!("/proc/{router}/cgroup")).unwrap();
        let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).expect("one of version 2");
        let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(|mount| Path::new(mount).join(own));
        mounts.into_iter().find(|group| group.join("cgroup.procs").exists()).expect("it is mounted")
    }

    /// Replaces a part of a host's configuration, and makes its router read it again.
    pub(crate) fn reload(&self, host: usize, from: &str, to: &str) {
        let path = self.path(&format!("{}.toml", self.hosts[host].name));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&path, text.replace(from, to)).unwrap();
        let router = self.hosts[host].router.as_ref().expect("it runs");
        kill_process(Pid::from_child(router), Signal::HUP).unwrap();
    }

    /// Stops a host's router, or continues it.
    pub(crate) fn hang(&self, host: usize, hangs: bool) {
        let router = self.hosts[host].router.as_ref().expect("it runs");
        kill_process(Pid::from_child(router), if hangs { Signal::STOP } else { Signal::CONT }).unwrap();
    }

    /// Adds a container to a host. The address of its device is derived from its overlay address.
    /// So it stays the same when the container moves, and is known in advance.
    pub(crate) fn add(&self, host: usize, address: Ipv4Addr) -> Net {
        let net = Net::new();
        let [.., third, fourth] = address.octets();
        let port = format!("p{third}-{fourth}");
        let script = format!(
            "link add {port} type veth peer name eth0 netns {} address {} mtu 1450\nlink set {port} master bridge up\n",
            net.path().display(),
            device_address(address),
        );
        batch(&self.hosts[host].net, &script);
        batch(&net, &format!("address add {address}/16 dev eth0\nlink set eth0 up\n"));
        net
    }

    /// Returns the private memory of a host's router, in KiB.
    pub(crate) fn memory(&self, host: usize) -> u64 {
        let router = self.hosts[host].router.as_ref().expect("it runs").id();
        let status = fs::read_to_string(format!("/proc/{router}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).expect("a figure in kB")
    }

    /// Returns the number of open descriptors of a host's router.
    pub(crate) fn descriptors(&self, host: usize) -> usize {
        let router = self.hosts[host].router.as_ref().expect("it runs").id();
        fs::read_dir(format!("/proc/{router}/fd")).unwrap().count()
    }

    pub(crate) fn control(&self, host: usize) -> PathBuf {
        self.path(&format!("{}-control.sock", self.hosts[host].name))
    }

    fn log_path(&self, host: usize) -> PathBuf {
        self.path(&format!("{}.log", self.hosts[host].name))
    }

    pub(crate) fn log(&self, host: usize) -> String {
        fs::read_to_string(self.log_path(host)).unwrap_or_default()
    }

    pub(crate) fn status(&self, host: usize) -> serde_json::Value {
        let control = self.control(host);
        let output = shunt(&["overlay", "status", "--json", "--control", control.to_str().unwrap()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs `shunt overlay policy` for a host's router.
    pub(crate) fn policy(&self, host: usize, words: &[&str]) -> Output {
        let control = self.control(host);
        shunt(&[&["overlay", "policy"], words, &["--control", control.to_str().unwrap()]].concat())
    }

    /// Applies a policy on a host, and returns the router's answer.
    pub(crate) fn apply(&self, host: usize, policy: &str) -> String {
        let path = self.path("policy.toml");
        fs::write(&path, policy).unwrap();
        let output = self.policy(host, &["apply", path.to_str().unwrap()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns how many connections of this end use the host network, and how many do not, by
    /// reason.
    pub(crate) fn paths(&self, host: usize, end: &str) -> (u64, serde_json::Value) {
        let paths = &self.status(host)["connections"][end];
        (paths["host"].as_u64().unwrap(), paths["overlay"].clone())
    }

    /// Returns a command for a host's container, with or without a supervisor.
    pub(crate) fn command(&self, host: usize, is_supervised: bool, program: impl AsRef<Path>) -> Command {
        if !is_supervised {
            return Command::new(program.as_ref());
        }
        let mut command = Command::new(&self.program);
        command.args(["overlay", "run", "--router"]).arg(self.socket(host)).arg("--").arg(program.as_ref());
        command
    }

    /// Runs a command in a host's container until it ends.
    pub(crate) fn output(&self, host: usize, command: &mut Command) -> Output {
        self.hosts[host].container.inside(|| command.stdin(Stdio::null()).output().unwrap())
    }

    /// Starts a command in a host's container. It runs until the lab ends. Waits until it has
    /// printed `word`.
    pub(crate) fn launch(&mut self, host: usize, command: &mut Command, word: &str) -> usize {
        let command = bound(&self.hosts[host].container, command);
        self.spawn(command, word)
    }

    /// Starts a command in the host's own network namespace.
    pub(crate) fn launch_on_host(&mut self, host: usize, command: &mut Command, word: &str) -> usize {
        let command = bound(&self.hosts[host].net, command);
        self.spawn(command, word)
    }

    /// Starts etcd on host a, with its data in this directory of the lab.
    pub(crate) fn start_etcd(&mut self, directory: &str, url: &str, options: &[String]) -> usize {
        let mut etcd = Command::new("etcd");
        etcd.arg("--data-dir").arg(self.path(directory));
        etcd.args(["--listen-client-urls", url, "--advertise-client-urls", url]);
        etcd.args(["--listen-peer-urls", "http://192.168.77.1:2380"]).args(options);
        self.launch_on_host(A, &mut etcd, "ready to serve client requests")
    }

    /// Starts a command in another network namespace.
    pub(crate) fn launch_in(&mut self, net: &Net, command: &mut Command, word: &str) -> usize {
        let command = bound(net, command);
        self.spawn(command, word)
    }

    fn spawn(&mut self, mut command: Command, word: &str) -> usize {
        let at = self.running.len();
        let path = self.path(&format!("{at}.out"));
        let file = fs::File::create(&path).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file).process_group(0);
        self.running.push(command.spawn().unwrap());
        let said = || fs::read_to_string(&path).unwrap_or_default();
        await_until(|| said().contains(word), said);
        at
    }

    /// Kills a started command.
    pub(crate) fn stop(&mut self, launched: usize) {
        let child = &mut self.running[launched];
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
        child.wait().unwrap();
    }

    /// Returns the process id of a started command.
    pub(crate) fn pid(&self, launched: usize) -> u32 {
        self.running[launched].id()
    }

    /// Returns how many sockets listen at a port in a host's container.
    pub(crate) fn listening(&self, host: usize, port: u16) -> usize {
        let mut ss = Command::new("ss");
        ss.args(["-Hltn", "sport", "=", &format!(":{port}")]);
        let listed = self.hosts[host].container.inside(|| ss.output().unwrap()).stdout;
        listed.iter().filter(|byte| **byte == b'\n').count()
    }

    /// Returns the output of a started command so far.
    pub(crate) fn said(&self, launched: usize) -> String {
        fs::read_to_string(self.path(&format!("{launched}.out"))).unwrap_or_default()
    }

    /// Returns whether a started command has ended.
    pub(crate) fn has_ended(&mut self, launched: usize) -> bool {
        self.running[launched].try_wait().unwrap().is_some()
    }

    /// Waits for the end of a started command, and returns its output.
    pub(crate) fn await_end(&mut self, launched: usize) -> String {
        let child = &mut self.running[launched];
        await_until(|| child.try_wait().unwrap().is_some(), || "it goes on".into());
        fs::read_to_string(self.path(&format!("{launched}.out"))).unwrap()
    }

    /// Returns the bytes that a device of a host has sent and received.
    pub(crate) fn bytes(&self, host: usize, device: &str) -> u64 {
        let mut command = Command::new("ip");
        command.args(["-j", "-s", "link", "show", device]);
        let output = self.hosts[host].net.inside(|| command.output().unwrap());
        let links: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let of = |direction: &str| links[0]["stats64"][direction]["bytes"].as_u64().unwrap();
        of("rx") + of("tx")
    }
}

/// Returns the address of the only device of an added container.
pub(crate) fn device_address(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// Executes these `ip` commands.
pub(crate) fn batch(net: &Net, lines: &str) {
    let mut ip = Command::new("ip");
    ip.args(["-batch", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut ip = net.inside(|| ip.spawn().unwrap());
    ip.stdin.take().expect("a pipe").write_all(lines.as_bytes()).unwrap();
    let output = ip.wait_with_output().unwrap();
    assert!(output.status.success(), "{lines}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Drop for Lab {
    fn drop(&mut self) {
        for child in &mut self.running {
            // The group includes workers. Each command has its own process group.
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
            let _ = child.wait();
        }
        for host in &mut self.hosts {
            if let Some(mut router) = host.router.take() {
                end(&mut router);
            }
        }
        if std::thread::panicking() {
            for host in [A, B] {
                eprintln!("--- router {}\n{}", self.hosts[host].name, self.log(host));
            }
        }
    }
}

/// Returns the command, to be run in a network namespace. The kernel sends it SIGTERM when the
/// thread that starts it ends, even if the test is killed.
fn bound(net: &Net, command: &Command) -> Command {
    let mut bound = Command::new("nsenter");
    bound.arg(format!("--net={}", net.path().display())).args(["setpriv", "--pdeathsig", "TERM"]);
    bound.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => bound.env(name, value),
            None => bound.env_remove(name),
        };
    }
    bound
}

/// Ends a router with SIGTERM, so that it removes its control group.
fn end(router: &mut Child) {
    let _ = kill_process(Pid::from_child(router), Signal::TERM);
    let deadline = Instant::now() + LIMIT;
    while matches!(router.try_wait(), Ok(None)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = router.kill();
    let _ = router.wait();
}

/// Finds an installed program, also one of PostgreSQL.
pub(crate) fn find(name: &str) -> PathBuf {
    let postgres = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let versions = postgres.map(|version| version.path().join("bin"));
    let places = versions.chain(["/usr/bin", "/usr/sbin"].map(PathBuf::from)).map(|place| place.join(name));
    places
        .into_iter()
        .find(|place| place.is_file())
        .unwrap_or_else(|| panic!("{name}: make test installs it"))
}

/// Returns a Go program. They are compiled statically, once for all tests.
pub(crate) fn go(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let directory = BUILT.get_or_init(|| {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("overlay");
        fs::create_dir_all(&directory).unwrap();
        for name in ["server", "client"] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/overlay/{name}.go"));
            let mut build = Command::new("go");
            build.args(["build", "-o"]).arg(directory.join(name)).arg(source);
            build.env("CGO_ENABLED", "0").env("GOCACHE", directory.join("cache")).env("GO111MODULE", "off");
            let output = build.output().expect("go is there: make test installs it");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        directory
    });
    directory.join(name)
}

/// Returns the capabilities of the router's systemd unit, for setpriv. One more is needed to create
/// a control group, because systemd creates it only for the unit.
fn capabilities() -> String {
    let unit = include_str!("../../../../packaging/systemd/system/shunt-overlay.service");
    let allowed = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let names = allowed
        .expect("the unit says so")
        .split(' ')
        .map(|name| name.trim_start_matches("CAP_").to_lowercase());
    names.chain(["dac_override".to_owned()]).fold("-all".to_owned(), |all, name| format!("{all},+{name}"))
}

/// The longest time that a test waits.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

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
