//! Finds the broker, and starts the user's own broker if none runs.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use shunt_broker::Mode;
use shunt_sys::{Errno, guard, seqpacket};

use crate::config::OfBroker;

/// How long a broker may take to start before the program goes on without it.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(1);
/// How long the broker that `shunt run` starts outlives its last program.
const IDLE_EXIT_SECONDS: &str = "300";
/// How long to wait for another broker after ours has ended, if no broker is known to be starting.
const RACE_LIMIT: Duration = Duration::from_millis(250);
const POLL: Duration = Duration::from_millis(5);

/// Why a broker cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Nothing listens at the path.
    Absent,
    /// The socket cannot be reached.
    Unreachable(Errno),
    /// The socket belongs to a user other than this one and root. That user would receive this
    /// user's sockets.
    Foreign(u32),
    /// Other users can put a socket of their own at this path.
    Unguarded,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Absent => f.write_str("nothing listens there"),
            Unusable::Unreachable(errno) => write!(f, "{}", describe(*errno)),
            Unusable::Foreign(uid) => write!(f, "it belongs to user {uid}, neither you nor root"),
            Unusable::Unguarded => f.write_str(
                "others may write to its directory, or in a container it is not mounted read-only",
            ),
        }
    }
}

/// No broker can be reached. Its text is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoBroker {
    /// The error, and what the user can do about it.
    pub(crate) why: String,
    /// The path at which a broker may appear later. `None` if that socket must not be used.
    pub(crate) later: Option<PathBuf>,
}

/// Returns the pid of the process that listens at `path`, as the kernel reports it. The connection
/// is closed again.
pub(crate) fn probe(path: &Path) -> Result<u32, Unusable> {
    let connection = seqpacket::connect(path.as_os_str().as_bytes()).map_err(|errno| match errno {
        Errno::NOENT | Errno::CONNREFUSED => Unusable::Absent,
        other => Unusable::Unreachable(other),
    })?;
    let owner = seqpacket::peer_credentials(&connection).map_err(Unusable::Unreachable)?;
    if owner.uid != 0 && owner.uid != geteuid().as_raw() {
        return Err(Unusable::Foreign(owner.uid));
    }
    if !guard::is_trusted(path, &connection) {
        return Err(Unusable::Unguarded);
    }
    Ok(owner.pid)
}

/// Returns the socket of a running broker.
///
/// The candidates are, in this order: `asked`, the user's broker, the system's broker. If none
/// runs, the user's broker is started.
pub(crate) fn reach(asked: Option<&Path>) -> Result<PathBuf, NoBroker> {
    let own = shunt_broker::user_socket();
    if let Some(path) = asked {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        // A program that `shunt run` started names the user's own socket here. That broker may be
        // started.
        let startable = own.as_ref().is_ok_and(|own| *own == path);
        match probe(&path) {
            Ok(_) => return Ok(path),
            Err(Unusable::Absent) if startable => {}
            Err(error) => {
                let hint = match error {
                    Unusable::Absent => format!("; start it with `shunt daemon --socket {}`", path.display()),
                    _ => String::new(),
                };
                let later =
                    (!matches!(error, Unusable::Foreign(_) | Unusable::Unguarded)).then(|| path.clone());
                return Err(NoBroker { why: format!("broker {}: {error}{hint}", path.display()), later });
            }
        }
    }
    if let Some(path) = first_alive() {
        return Ok(path);
    }
    let path = own.map_err(|error| NoBroker { why: error.to_string(), later: None })?;
    match probe(&path) {
        Ok(_) => Ok(path),
        Err(Unusable::Absent) => {
            if let Err(error) = shunt_broker::make_user_socket() {
                return Err(NoBroker { why: error.to_string(), later: None });
            }
            match start(&path) {
                Ok(()) => Ok(path),
                Err(why) => Err(NoBroker { why, later: Some(path) }),
            }
        }
        Err(error) => Err(NoBroker { why: format!("broker {}: {error}", path.display()), later: None }),
    }
}

/// Returns the first of the default sockets at which a usable broker listens.
pub(crate) fn first_alive() -> Option<PathBuf> {
    shunt_broker::socket_candidates().into_iter().find(|path| probe(path).is_ok())
}

/// Starts a broker in the background.
///
/// The child that is awaited here is not the broker: it detaches the broker and exits. So CMD
/// inherits no child that it did not start.
fn start(socket: &Path) -> Result<(), String> {
    let failed = |why: &dyn fmt::Display| format!("the broker did not start: {why}");
    let configured = OfBroker::read(false).map_err(|faults| failed(&faults))?;
    let mut command = myself();
    command.args(["daemon", "--detach"]);
    if !configured.has_idle_exit() {
        command.args(["--idle-exit", IDLE_EXIT_SECONDS]);
    }
    let output = command
        .arg("--socket")
        .arg(socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| failed(&error))?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let line = complaint.lines().last().unwrap_or("it ended without a word");
    Err(failed(&line.trim_start_matches("shunt: ")))
}

/// Returns a command that runs this program. The shim is not loaded into it, and it does not
/// inherit the sockets and the notification socket that systemd passed to this process.
pub(crate) fn myself() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into()));
    for variable in ["LD_PRELOAD", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET"] {
        command.env_remove(variable);
    }
    command
}

/// Waits until a broker accepts connections at `path`, and returns its pid.
///
/// Fails if no broker answers in time. `ended` returns the error of the started process once that
/// process has ended, for example because another broker is starting.
pub(crate) fn await_start(
    path: &Path,
    mode: Mode,
    mut ended: impl FnMut() -> Option<String>,
) -> Result<u32, String> {
    let mut deadline = Instant::now() + START_LIMIT;
    let mut complaint = None;
    loop {
        match probe(path) {
            Ok(pid) => return Ok(pid),
            Err(Unusable::Absent) => {}
            Err(error) => return Err(error.to_string()),
        }
        if complaint.is_none() {
            complaint = ended();
            if complaint.is_some() && shunt_broker::lock_holder(path, mode).is_none() {
                deadline = deadline.min(Instant::now() + RACE_LIMIT);
            }
        }
        if Instant::now() > deadline {
            return Err(complaint.unwrap_or_else(|| format!("it does not answer after {START_LIMIT:?}")));
        }
        std::thread::sleep(POLL);
    }
}

fn describe(errno: Errno) -> String {
    match errno {
        Errno::ACCESS => "permission denied".to_owned(),
        Errno::PROTOTYPE | Errno::NOTSOCK => "it is not a broker's socket".to_owned(),
        Errno::NAMETOOLONG => "the path is too long for a socket".to_owned(),
        other => std::io::Error::from(other).to_string(),
    }
}
