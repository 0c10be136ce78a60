//! `shunt-enter NUMBER -- PROGRAM...`: what a container's program is started by. It puts itself under a filter that shows some system
//! calls to a supervisor outside the container, and becomes the program. The supervisor is at the other end of the descriptor NUMBER, and
//! says what the filter is. Linked statically, since it runs in any image.
//!
//! The program runs in any case. What goes wrong before is one line on standard error.

#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::errno::Errno as ExecError;
use nix::unistd::execve;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use shunt_start::program;
use shunt_sys::{Errno, inherited, seccomp, seqpacket};
use thiserror::Error;

/// The supervisor answers at once, or not at all.
const LIMIT: Duration = Duration::from_secs(5);
/// A filter is short.
const FILTER: usize = 32 * 1024;

/// Why nobody is shown the program's calls.
#[derive(Debug, Error)]
enum EnterError {
    #[error("shunt-enter was called by hand: it is for shunt-runtime")]
    NoNumber,
    #[error("no supervisor has been left for it: {0}")]
    NoSupervisor(Errno),
    #[error("its supervisor does not answer: {0}")]
    Silent(Errno),
    #[error("its system calls are shown to another supervisor already, and the kernel allows one")]
    Supervised,
    #[error("{what}: {source}")]
    Kernel { what: &'static str, source: Errno },
}

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let number = words.next();
    let command: Vec<OsString> = words.skip_while(|word| word == "--").collect();
    let Some(name) = command.first() else {
        say("no program is named");
        return ExitCode::from(127);
    };
    if let Err(error) = enter(number.as_deref()) {
        say(&format!("{} runs on the overlay: {error}", name.display()));
    }
    let Err((why, exit_code)) = become_program(&command);
    say(&format!("{}: {why}", name.display()));
    ExitCode::from(exit_code)
}

fn enter(number: Option<&OsStr>) -> Result<(), EnterError> {
    let number = number.and_then(OsStr::to_str).and_then(|number| number.parse().ok());
    let supervisor =
        inherited::take(number.ok_or(EnterError::NoNumber)?).map_err(EnterError::NoSupervisor)?;
    let filter = receive(&supervisor).map_err(EnterError::Silent)?;
    let kernel = |what| move |source| EnterError::Kernel { what, source };
    // By which the supervisor knows the network namespace. Of some family, whichever the container may use.
    let open = |family| socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let shown =
        open(AddressFamily::INET).or_else(|_| open(AddressFamily::UNIX)).map_err(kernel("a socket"))?;
    seccomp::prepare().map_err(kernel("no_new_privs"))?;
    let listener = seccomp::watch_described(&filter).map_err(|error| match error {
        Errno::BUSY => EnterError::Supervised,
        source => EnterError::Kernel { what: "a seccomp filter with a listener (Linux 5.19)", source },
    })?;
    // From here on somebody has to answer: should that fail, the calls that make connections do.
    seqpacket::send(&supervisor, b"l", &[listener.as_fd(), shown.as_fd()]).map_err(EnterError::Silent)?;
    receive(&supervisor).map(drop).map_err(EnterError::Silent)
}

/// The supervisor's next message.
fn receive(supervisor: &OwnedFd) -> Result<Vec<u8>, Errno> {
    let deadline = Instant::now() + LIMIT;
    let mut message = vec![0; FILTER];
    loop {
        match seqpacket::recv(supervisor, &mut message) {
            Ok((0, _)) => return Err(Errno::PIPE),
            Ok((len, _)) => {
                message.truncate(len);
                return Ok(message);
            }
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        // A signal makes for another look.
        let _ = poll(&mut [PollFd::new(supervisor, PollFlags::IN)], Some(&left));
    }
}

/// As the container's runtime would: found in PATH, and executed by nothing but the kernel. Returns only why not, and the exit code.
fn become_program(command: &[OsString]) -> Result<Infallible, (String, u8)> {
    let found = program::find(&command[0], std::env::var_os("PATH"));
    let path = found.map_err(|error| (error.to_string(), error.exit_code()))?;
    let file = c_string(path.into_os_string())?;
    let arguments = command.iter().map(|word| c_string(word.clone())).collect::<Result<Vec<_>, _>>()?;
    let environment = std::env::vars_os().map(|(mut name, value)| {
        name.push("=");
        name.push(value);
        c_string(name)
    });
    let environment = environment.collect::<Result<Vec<_>, _>>()?;
    if !shunt_start::sigpipe_was_ignored() {
        sigpipe::reset();
    }
    let Err(error) = execve(&file, &arguments, &environment);
    // What is missing is not the file, which is there, but its interpreter or its dynamic linker.
    Err((error.desc().to_owned(), if error == ExecError::ENOENT { 127 } else { 126 }))
}

fn c_string(text: OsString) -> Result<CString, (String, u8)> {
    CString::new(text.into_vec()).map_err(|error| {
        (format!("{:?} has a zero byte in it", OsStr::from_bytes(&error.into_vec()).display()), 126)
    })
}

/// If nobody reads it, the program runs all the same.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "shunt: {line}");
}
