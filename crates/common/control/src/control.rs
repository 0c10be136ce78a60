//! The control socket of a running daemon: a request is one line of JSON, and so is its answer.
//! Each kind of daemon defines its own requests.
//!
//! It is a Unix socket that only its owner and root may use. Its file mode enforces that. The
//! daemon also checks the peer's credentials, since the mode can be changed and the directory can
//! be exposed to other users.

use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader as AsyncReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Done(Value),
    Failed(String),
}

/// The reason for which there is no answer.
#[derive(Debug, Error)]
pub enum AskError {
    /// No process listens there.
    #[error("no {what} answers at {path} ({source}): is it running, with that control socket?")]
    Absent {
        /// The kind of daemon that should listen there.
        what: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The daemon did not answer in time.
    #[error("the {what} at {path} does not answer within {} s: is it stopped, or very busy?", within.as_secs())]
    Silent {
        /// The kind of daemon that should answer.
        what: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// The time that it had.
        within: Duration,
    },
    /// The other process ended, or sent no valid answer.
    #[error("what answers at {path} is no {what} of this version")]
    Strange {
        /// The kind of daemon that should listen there.
        what: &'static str,
        /// The path of the socket.
        path: PathBuf,
    },
    /// The daemon refused the request.
    #[error("{0}")]
    Refused(String),
}

/// The time that [`ask`] waits for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// The largest answer, in bytes. A process that answers in place of a daemon must not be able to
/// exhaust the memory.
const ANSWER: usize = 64 << 20;
/// The time that a client of a control socket has for its request, and then to read the answer.
const ASK_WITHIN: Duration = Duration::from_secs(30);
/// The time within which a running daemon is found at the path of a new one's socket.
const FOUND_WITHIN: Duration = Duration::from_secs(1);

/// Sends a request to the daemon with that control socket. `what` is the kind of daemon, for
/// messages.
pub fn ask(what: &'static str, path: &Path, request: &impl Serialize) -> Result<Value, AskError> {
    ask_within(ANSWER_WITHIN, what, path, request)
}

fn ask_within(
    within: Duration,
    what: &'static str,
    path: &Path,
    request: &impl Serialize,
) -> Result<Value, AskError> {
    let absent = |source| AskError::Absent { what, path: path.to_owned(), source };
    let is_strange = || AskError::Strange { what, path: path.to_owned() };
    let strange = |error: io::Error| match is_late(&error) {
        true => AskError::Silent { what, path: path.to_owned(), within },
        false => is_strange(),
    };
    let deadline = Instant::now() + within;
    let stream = connect(path, within).map_err(|error| match is_late(&error) {
        true => strange(error),
        false => absent(error),
    })?;
    let mut line = serde_json::to_string(request).expect("it has no maps with odd keys");
    line.push('\n');
    // A daemon that refuses the user closes the connection without reading the request. Its answer
    // is there all the same.
    let written = (&stream).write_all(line.as_bytes());
    let answer = read_line(&stream, deadline).and_then(|answer| match written {
        Err(error) if answer.is_empty() => Err(error),
        _ => Ok(answer),
    });
    let answer = answer.map_err(strange)?;
    match serde_json::from_slice(&answer).map_err(|_| is_strange())? {
        Answer::Done(value) => Ok(value),
        Answer::Failed(why) => Err(AskError::Refused(why)),
    }
}

/// Connects to a socket. Its queue may be full, because the daemon is stopped.
fn connect(path: &Path, within: Duration) -> io::Result<StdStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_write_timeout(Some(within))?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(socket.into())
}

/// Reads a line of at most [`ANSWER`] bytes.
fn read_line(mut stream: &StdStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let (mut line, mut part) = (Vec::new(), [0; 65_536]);
    while line.last() != Some(&b'\n') {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(count) if line.len() + count > ANSWER => return Err(io::ErrorKind::InvalidData.into()),
            Ok(count) => line.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(line)
}

/// Returns `true` for the error of a call whose time is over.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A request, and the channel for its answer.
pub type Asked<Request> = (Request, oneshot::Sender<Result<Value, String>>);

/// A control socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    listener: UnixListener,
}

/// The largest length of a request, in bytes. A policy of an overlay with 5,000 rules has two
/// million.
const LINE: u64 = 64 << 20;

impl Control {
    /// Opens a control socket. Replaces the file of a daemon that was killed, but not that of a
    /// running one.
    pub fn open(what: &str, path: &Path) -> io::Result<Control> {
        // A full queue also shows that a daemon listens.
        if connect(path, FOUND_WITHIN).map_or_else(|error| is_late(&error), |_| true) {
            let why = format!("a {what} runs already with the control socket {}", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Control { path: path.to_owned(), listener })
    }

    /// Accepts connections, and passes their requests to `asked`.
    pub async fn serve<Request: DeserializeOwned + Send + 'static>(
        &self,
        asked: mpsc::Sender<Asked<Request>>,
    ) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(answer(stream, asked.clone()))),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns `true` if the peer runs as this process's user or as root.
fn may_ask(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == geteuid().as_raw())
}

async fn answer<Request: DeserializeOwned + Send + 'static>(
    mut stream: UnixStream,
    asked: mpsc::Sender<Asked<Request>>,
) {
    // A stranger's request is not read, so that it keeps neither a task nor a descriptor.
    let answer = if may_ask(&stream) {
        request(&mut stream, asked).await
    } else {
        Some(Answer::Failed("only the user that it runs as and root may ask it".to_owned()))
    };
    let Some(answer) = answer else { return };
    let text = elsewhere(move || serde_json::to_string(&answer).expect("it was JSON")).await;
    let Some(text) = text else { return };
    let _ = timeout(ASK_WITHIN, stream.write_all(format!("{text}\n").as_bytes())).await;
}

/// Runs work on another thread. Long requests and answers would delay the daemon's other tasks. Returns
/// `None` if the daemon ends.
async fn elsewhere<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

/// Reads a request, and returns its answer. Returns `None` if there is no request or no daemon.
async fn request<Request: DeserializeOwned + Send + 'static>(
    stream: &mut UnixStream,
    asked: mpsc::Sender<Asked<Request>>,
) -> Option<Answer> {
    let mut line = String::new();
    let mut read = AsyncReader::new(stream.take(LINE));
    timeout(ASK_WITHIN, read.read_line(&mut line)).await.ok()?.ok()?;
    let request = match elsewhere(move || serde_json::from_str(&line)).await? {
        Err(error) => return Some(Answer::Failed(format!("this is no request: {error}"))),
        Ok(request) => request,
    };
    let (sender, receiver) = oneshot::channel();
    asked.send((request, sender)).await.ok()?;
    Some(match receiver.await.ok()? {
        Ok(value) => Answer::Done(value),
        Err(why) => Answer::Failed(why),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener as StdListener;

    use super::*;

    /// Asks a daemon that does `work` with each connection, and has little time.
    fn ask_one_that(work: impl Fn(StdStream) + Send + 'static) -> Result<Value, AskError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = StdListener::bind(&path).unwrap();
        std::thread::spawn(move || work(listener.accept().unwrap().0));
        ask_within(Duration::from_millis(300), "thing", &path, &"status")
    }

    #[test]
    fn an_answer_has_all_of_its_time_once_and_not_for_each_part() {
        let answered = ask_one_that(|mut stream| {
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        assert!(matches!(answered, Err(AskError::Silent { .. })), "{answered:?}");
    }

    #[test]
    fn an_answer_without_an_end_is_not_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = StdListener::bind(&path).unwrap();
        let endless = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut sent = 0;
            while let Ok(count) = stream.write(&[b' '; 1 << 20]) {
                sent += count;
            }
            sent
        });
        let answered = ask("thing", &path, &"status");
        assert!(matches!(answered, Err(AskError::Strange { .. })), "{answered:?}");
        assert!(endless.join().unwrap() < 2 * ANSWER);
    }

    #[test]
    fn a_daemon_that_accepts_nothing_is_given_up_and_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        socket.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        socket.listen(0).unwrap();
        let within = Duration::from_millis(100);
        let mut waiting = Vec::new();
        while let Ok(stream) = connect(&path, within) {
            waiting.push(stream);
        }
        let answered = ask_within(within, "thing", &path, &"status");
        assert!(matches!(answered, Err(AskError::Silent { .. })), "{answered:?}");
        let opened = Control::open("thing", &path).map(drop).unwrap_err();
        assert_eq!(opened.kind(), io::ErrorKind::AddrInUse);
    }
}
