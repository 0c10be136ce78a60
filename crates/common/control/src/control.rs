//! The control socket of a running daemon: a request is one line of JSON, and so is its answer.
//! Each kind of daemon defines its own requests.
//!
//! It is a Unix socket that only its owner and root may use. Its file mode enforces that. The
//! daemon also checks the peer's credentials, since the mode can be changed and the directory can
//! be exposed to other users.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
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
    #[error("the {what} at {path} does not answer within {} s: is it stopped, or very busy?", ANSWER_WITHIN.as_secs())]
    Silent {
        /// The kind of daemon that should answer.
        what: &'static str,
        /// The path of the socket.
        path: PathBuf,
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
/// The time that a client of a control socket has for its request.
const ASK_WITHIN: Duration = Duration::from_secs(30);

/// Sends a request to the daemon with that control socket. `what` is the kind of daemon, for
/// messages.
pub fn ask(what: &'static str, path: &Path, request: &impl Serialize) -> Result<Value, AskError> {
    let absent = |source| AskError::Absent { what, path: path.to_owned(), source };
    let is_strange = || AskError::Strange { what, path: path.to_owned() };
    let strange = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            AskError::Silent { what, path: path.to_owned() }
        }
        _ => is_strange(),
    };
    let mut stream = StdStream::connect(path).map_err(absent)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN)).map_err(absent)?;
    let line = serde_json::to_string(request).expect("it has no maps with odd keys");
    writeln!(stream, "{line}").map_err(strange)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).map_err(strange)?;
    match serde_json::from_str(&answer).map_err(|_| is_strange())? {
        Answer::Done(value) => Ok(value),
        Answer::Failed(why) => Err(AskError::Refused(why)),
    }
}

/// A request, and the channel for its answer.
pub type Asked<Request> = (Request, oneshot::Sender<Result<Value, String>>);

/// A control socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    listener: UnixListener,
}

/// The largest length of a request, in bytes.
const LINE: u64 = 1 << 20;

impl Control {
    /// Opens a control socket. Replaces the file of a daemon that was killed, but not that of a
    /// running one.
    pub fn open(what: &str, path: &Path) -> io::Result<Control> {
        if StdStream::connect(path).is_ok() {
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

async fn answer<Request: DeserializeOwned>(mut stream: UnixStream, asked: mpsc::Sender<Asked<Request>>) {
    let may_ask = may_ask(&stream);
    let (read, mut write) = stream.split();
    let mut line = String::new();
    let mut read = AsyncReader::new(read.take(LINE));
    // A client that sends no request keeps neither a task nor a descriptor.
    if !matches!(timeout(ASK_WITHIN, read.read_line(&mut line)).await, Ok(Ok(_))) {
        return;
    }
    let answer = match serde_json::from_str(&line) {
        _ if !may_ask => Answer::Failed("only the user that it runs as and root may ask it".to_owned()),
        Err(error) => Answer::Failed(format!("this is no request: {error}")),
        Ok(request) => {
            let (sender, receiver) = oneshot::channel();
            if asked.send((request, sender)).await.is_err() {
                return;
            }
            match receiver.await {
                Ok(Ok(value)) => Answer::Done(value),
                Ok(Err(why)) => Answer::Failed(why),
                Err(_) => return,
            }
        }
    };
    let text = serde_json::to_string(&answer).expect("it was JSON");
    let _ = write.write_all(format!("{text}\n").as_bytes()).await;
}
