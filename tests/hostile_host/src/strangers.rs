//! The kinds of attackers, and how to start them.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use shunt_built::copy_executable;

use crate::Broker;

/// The rights of a stranger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Another user on the host.
    User,
    /// Root in a container: in separate namespaces, with the capabilities that Docker grants, and
    /// with the broker's directory mounted as documented.
    Container,
    /// Root in a container with all capabilities. It stands for an attacker that can hold a kernel
    /// lock. There are ways to do so without capabilities, such as a user-space file system.
    Holder,
}

/// The capabilities that Docker grants to root in a container.
const CAPABILITIES: &str = "-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,\
    +setpcap,+net_bind_service,+sys_chroot,+kill,+audit_write";

/// A running attack. It ends on drop.
#[derive(Debug)]
pub struct Stranger {
    child: Child,
    /// The line that it printed once it was at work.
    pub report: String,
}

impl Stranger {
    /// Runs `program` with the name of an attack. Returns once it is at work.
    pub fn start(broker: &Broker, program: &Path, who: Who, attack: &str) -> Stranger {
        // All users can reach this copy.
        let copy = broker.beside("attack");
        if !copy.exists() {
            copy_executable(program, &copy);
        }
        let mut command = Command::new(match who {
            Who::User => "setpriv",
            Who::Container | Who::Holder => "unshare",
        });
        let arguments =
            [copy.as_os_str(), attack.as_ref(), broker.socket().as_os_str()].map(ToOwned::to_owned);
        match who {
            Who::User => {
                command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
                command.args(arguments);
            }
            Who::Container | Who::Holder => {
                // The attack ends when its standard input is closed, and with it all processes of
                // its pid namespace.
                command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
                let capabilities = if who == Who::Container { CAPABILITIES } else { "+all" };
                let script = format!(
                    "ip link set lo up && mount --bind -o ro \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && \
                     exec setpriv --bounding-set={capabilities} --inh-caps=-all --no-new-privs \"$@\""
                );
                command.args(["sh", "-c", &script]).arg(broker.place()).args(arguments);
            }
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = broker.host.inside(|| command.spawn()).expect("setpriv and unshare (util-linux)");
        let mut report = String::new();
        let output = child.stdout.take().expect("piped");
        BufReader::new(output).read_line(&mut report).expect("a pipe");
        assert!(report.starts_with("at work"), "{attack} as {who:?} did not begin: {report:?}");
        Stranger { child, report: report.trim().to_owned() }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
