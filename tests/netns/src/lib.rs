//! Hosts and containers for the tests, as network namespaces that exist as long as a process holds
//! them. They have no names, so nothing is left behind however a test ends. Needs root.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::Command;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// A network namespace, with its loopback interface up.
#[derive(Debug)]
pub struct Net {
    handle: File,
}

impl Net {
    /// Returns a new network namespace.
    #[allow(clippy::new_without_default, reason = "it is a thing of the kernel, not a value")]
    pub fn new() -> Net {
        let made = std::thread::spawn(|| {
            // SAFETY: only the network namespace of this thread changes, and the thread does
            // nothing else.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
                .expect("as root, the tests need to make network namespaces (CAP_SYS_ADMIN)");
            File::open("/proc/thread-self/ns/net").expect("a thread has a namespace")
        });
        let net = Net { handle: made.join().expect("the thread that made it") };
        net.run("ip", ["link", "set", "lo", "up"]);
        net
    }

    /// Returns the namespace of the caller.
    pub fn current() -> Net {
        Net { handle: File::open("/proc/thread-self/ns/net").expect("a thread has a namespace") }
    }

    /// Returns the namespace of a file under /proc.
    pub fn at(path: impl AsRef<std::path::Path>) -> Net {
        Net { handle: File::open(path).expect("somebody is in the network namespace") }
    }

    /// Runs `work` inside, on a separate thread, so that the caller stays in its namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                move_into_link_name_space(self.handle.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("root may enter a network namespace it made");
                work()
            });
            match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Runs a program inside. It must succeed.
    pub fn run<A: AsRef<OsStr>>(&self, program: &str, arguments: impl IntoIterator<Item = A>) {
        let mut command = Command::new(program);
        command.args(arguments).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        let output = self.inside(|| command.output()).unwrap_or_else(|error| panic!("{program}: {error}"));
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Runs a command line of plain words inside. It must succeed.
    pub fn words(&self, line: &str) {
        let (program, rest) = line.split_once(' ').expect("a program and its arguments");
        self.run(program, rest.split_whitespace());
    }

    /// Returns whether an interface of this name exists.
    pub fn has_interface(&self, name: &str) -> bool {
        let mut command = Command::new("ip");
        command.args(["link", "show", name]);
        self.inside(|| command.output()).expect("ip (iproute2) is there").status.success()
    }

    /// Returns a path for other processes, for `nsenter --net=` and `ip link set netns`.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.handle.as_raw_fd()).into()
    }

    /// Connects two namespaces with a pair of interfaces: `one` and `two` contain the namespace,
    /// the interface's name and its address with prefix length.
    pub fn connect(one: (&Net, &str, &str), two: (&Net, &str, &str)) {
        one.0.words(&format!("ip link add {} type veth peer name shunt-peer", one.1));
        let path = two.0.path();
        one.0.words(&format!("ip link set shunt-peer netns {}", path.display()));
        two.0.words(&format!("ip link set shunt-peer name {}", two.1));
        for (net, name, address) in [one, two] {
            net.words(&format!("ip address add {address} dev {name} nodad"));
            net.words(&format!("ip link set {name} up"));
        }
    }
}
