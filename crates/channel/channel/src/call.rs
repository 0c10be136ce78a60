//! Requests and their responses: a channel to the server, and one back for each client.
//!
//! ```text
//! client                                                     server
//! Sender ── introduction: number 0, a descriptor ──────────> Receiver
//!        ── request: a number from 1 on, bytes ────────────>
//! Receiver <── response: its request's number, bytes ─────── Sender over that descriptor
//! ```
//!
//! The number is the first 8 bytes of a message. The descriptor is one end of a socket pair, which
//! the client has made. A client is *introduced* once; one that breaks this order is ended, as a
//! sender is that breaks the channel's protocol. A server may respond in any order, or not at all.

use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shunt_sys::Errno;
use thiserror::Error;

use crate::error::{Cause, OpenError, ReceiveError, SendError};
use crate::message::Message;
use crate::receiver::{Event, Options, Receiver, SenderId};
use crate::sender::{Sender, SenderOptions};
use crate::wait::Wait;

/// Bytes of the number before a request or a response.
const NUMBER: usize = 8;
/// The number of an introduction.
const INTRODUCTION: u64 = 0;
/// Messages that are no requests, after which the time-out of a call applies.
const ASIDE: u32 = 64;

/// Returns the number of a message, if it has one.
fn number(message: &Message) -> Option<u64> {
    message.bytes().first_chunk::<NUMBER>().map(|bytes| u64::from_ne_bytes(*bytes))
}

/// Sends a numbered message.
fn send(
    sender: &mut Sender,
    number: u64,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    wait: Wait,
) -> Result<(), SendError> {
    let number = number.to_ne_bytes();
    sender.send_gathered(&[IoSlice::new(&number), IoSlice::new(bytes)], descriptors, wait)
}

/// A request that a server has received, or a response that a client has. Its memory is reused.
#[derive(Debug, Default)]
pub struct Numbered {
    message: Message,
    from: Option<SenderId>,
}

impl Numbered {
    /// Returns an empty one.
    pub fn new() -> Numbered {
        Numbered::default()
    }

    /// Returns the number of the request.
    pub fn number(&self) -> u64 {
        number(&self.message).unwrap_or(INTRODUCTION)
    }

    /// Returns the client of a request.
    pub fn client(&self) -> Option<SenderId> {
        self.from
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        self.message.bytes().get(NUMBER..).unwrap_or_default()
    }

    /// Returns the descriptors, as [`Message::descriptors`] does.
    pub fn descriptors(&self) -> &[OwnedFd] {
        self.message.descriptors()
    }

    /// Takes the descriptors.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        self.message.take_descriptors()
    }
}

/// The end that responds, for any number of clients.
///
/// ```
/// use shunt_channel::{Client, Numbered, Options, SenderOptions, Server, Wait};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("calls");
/// let mut server = Server::listen(&path, Options::default(), SenderOptions::default())?;
/// let asking = std::thread::spawn(move || {
///     let mut client = Client::connect(&path, SenderOptions::default(), Wait::Forever).unwrap();
///     let mut response = Numbered::new();
///     client.call(b"ping", &[], &mut response, Wait::Forever).unwrap();
///     assert_eq!(response.bytes(), b"ping, pong");
/// });
/// let mut request = Numbered::new();
/// server.receive(&mut request, Wait::Forever)?;
/// let answer = [request.bytes(), b", pong"].concat();
/// server.respond(&request, &answer, &[], Wait::Forever)?;
/// # asking.join().unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Server {
    receiver: Receiver,
    /// `None` for a client that has gone, and whose requests are still there.
    clients: HashMap<SenderId, Option<Sender>>,
    responses: SenderOptions,
    /// Number of responses whose client had gone.
    unanswered: u64,
}

impl Server {
    /// Returns a server that listens at `path`, as [`Receiver::listen`] does. Each client's responses
    /// go through a separate ring of `responses.ring_bytes`, allocated when the client comes.
    pub fn listen(
        path: impl AsRef<Path>,
        options: Options,
        responses: SenderOptions,
    ) -> Result<Server, OpenError> {
        let receiver = Receiver::listen(path, options)?;
        Ok(Server { receiver, clients: HashMap::new(), responses, unanswered: 0 })
    }

    /// Receives the next request. Requests of one client come in its order.
    pub fn receive(&mut self, request: &mut Numbered, wait: Wait) -> Result<(), ReceiveError> {
        let mut aside = 0;
        loop {
            match self.receiver.receive(&mut request.message, wait)? {
                Event::Ended { sender, .. } => drop(self.clients.remove(&sender)),
                Event::Message { from } => match self.admit(from, &mut request.message) {
                    Ok(true) => {
                        request.from = Some(from);
                        return Ok(());
                    }
                    Ok(false) => {}
                    Err(cause) => self.receiver.refuse(from, cause),
                },
            }
            aside += 1;
            if aside >= ASIDE && wait.is_over() {
                self.receiver.nudge()?;
                let is_never = wait == Wait::Never;
                return Err(if is_never { ReceiveError::WouldBlock } else { ReceiveError::TimedOut });
            }
        }
    }

    /// Returns whether a message is a request. Introduces its client if it is an introduction.
    fn admit(&mut self, from: SenderId, message: &mut Message) -> Result<bool, Cause> {
        let number = number(message).ok_or(Cause::Misbehaved("a request without a number"))?;
        match (number, self.clients.contains_key(&from)) {
            (INTRODUCTION, false) => {
                let mut descriptors = message.take_descriptors();
                let socket = descriptors.pop().filter(|_| descriptors.is_empty());
                let socket = socket.ok_or(Cause::Misbehaved("an introduction without a socket"))?;
                let back = match Sender::for_server(socket, self.responses) {
                    Ok(back) => Some(back),
                    Err(error) if matches!(error.errno(), Errno::PIPE | Errno::CONNRESET) => None,
                    Err(error) => return Err(Cause::Socket(error.errno())),
                };
                self.clients.insert(from, back);
                Ok(false)
            }
            (INTRODUCTION, true) => Err(Cause::Misbehaved("a second introduction")),
            (_, true) => Ok(true),
            (_, false) => Err(Cause::Misbehaved("a request before an introduction")),
        }
    }

    /// Sends the response to a request. With [`Wait::Never`], no client keeps the server from others:
    /// one that does not read its responses causes [`SendError::WouldBlock`]. [`SendError::Gone`]: the
    /// client has gone, which is [counted](Self::unanswered).
    pub fn respond(
        &mut self,
        request: &Numbered,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        match request.from {
            Some(client) => self.respond_to(client, request.number(), bytes, descriptors, wait),
            None => Err(SendError::Gone),
        }
    }

    /// Sends a response as [`respond`](Self::respond) does, to the request with this number of this
    /// client. The client gives the server up if it has sent no such request.
    pub fn respond_to(
        &mut self,
        client: SenderId,
        number: u64,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        let result = match self.clients.get_mut(&client) {
            Some(Some(back)) => send(back, number, bytes, descriptors, wait),
            _ => Err(SendError::Gone),
        };
        self.unanswered += u64::from(result == Err(SendError::Gone));
        result
    }

    /// Returns how many responses were not sent, because their client had gone.
    pub fn unanswered(&self) -> u64 {
        self.unanswered
    }

    /// Returns the sender of the responses to the client of a request.
    #[cfg(feature = "tokio")]
    pub(crate) fn sender_to(&self, request: &Numbered) -> Option<&Sender> {
        self.clients.get(&request.from?)?.as_ref()
    }

    /// Returns the receiver of the requests, for its [credentials](Receiver::credentials).
    pub fn receiver(&self) -> &Receiver {
        &self.receiver
    }
}

impl AsFd for Server {
    /// Returns a descriptor for poll, as that of a [`Receiver`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

/// The reason why a call has no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    /// The request was not sent.
    #[error("the request was not sent: {0}")]
    Send(#[from] SendError),
    /// No response was received. The request may have been served.
    #[error("no response: {0}")]
    Receive(#[from] ReceiveError),
    /// The server has closed, or has died.
    #[error("the server has gone")]
    Gone,
    /// The server broke the protocol.
    #[error("the server broke the protocol")]
    Misbehaved,
}

/// The end that asks.
#[derive(Debug)]
pub struct Client {
    sender: Sender,
    receiver: Receiver,
    /// The number of the last request.
    last: u64,
}

impl Client {
    /// Connects to the server that listens at `path`.
    pub fn connect(
        path: impl AsRef<Path>,
        options: SenderOptions,
        wait: Wait,
    ) -> Result<Client, CallOpenError> {
        let mut sender = Sender::connect_with(path, options, wait)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|error| OpenError::of("making a pair of sockets", error))?;
        let mut receiver = Receiver::new(Options { max_senders: 1, ..Options::default() })?;
        receiver.adopt(ours)?;
        send(&mut sender, INTRODUCTION, &[], &[theirs.as_fd()], wait)?;
        Ok(Client { sender, receiver, last: INTRODUCTION })
    }

    /// Sends a request, and waits for its response. Responses to earlier requests are discarded.
    pub fn call(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        response: &mut Numbered,
        wait: Wait,
    ) -> Result<(), CallError> {
        let number = self.request(bytes, descriptors, wait)?;
        while self.response(response, wait)? != number {}
        Ok(())
    }

    /// Sends a request, and returns its number. Several requests may wait for their responses.
    pub fn request(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<u64, SendError> {
        send(&mut self.sender, self.last + 1, bytes, descriptors, wait)?;
        self.last += 1;
        Ok(self.last)
    }

    /// Returns the sender of the requests.
    #[cfg(feature = "tokio")]
    pub(crate) fn sender(&self) -> &Sender {
        &self.sender
    }

    /// Receives the next response, and returns the number of its request.
    pub fn response(&mut self, response: &mut Numbered, wait: Wait) -> Result<u64, CallError> {
        match self.receiver.receive(&mut response.message, wait) {
            Ok(Event::Message { .. }) => {}
            Ok(Event::Ended { cause: Cause::Closed | Cause::Midway, .. }) | Err(ReceiveError::NoSenders) => {
                return Err(CallError::Gone);
            }
            Ok(Event::Ended { .. }) => return Err(CallError::Misbehaved),
            Err(error) => return Err(error.into()),
        }
        match number(&response.message) {
            Some(number) if (1..=self.last).contains(&number) => Ok(number),
            _ => Err(CallError::Misbehaved),
        }
    }
}

impl AsFd for Client {
    /// Returns a descriptor for poll. It becomes readable when a [`response`](Client::response) that
    /// returned [`ReceiveError::WouldBlock`] should be tried again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

/// The reason why a client could not be made.
#[derive(Debug, Error)]
pub enum CallOpenError {
    /// It could not connect.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It could not introduce itself.
    #[error("the introduction was not sent: {0}")]
    Send(#[from] SendError),
}
