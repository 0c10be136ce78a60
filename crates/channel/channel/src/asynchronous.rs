//! The ends of channels for tokio, without a helper thread.
//!
//! ```text
//! attempt, with Wait::Never ── done ──> returns
//!    ^        │ would block: this end's sleep is announced, and everything was checked after that
//!    │        v
//!    └── readable().await, clear_ready()
//! ```
//!
//! **No wake-up is lost.** An attempt that would block has announced the sleep in the shared words and
//! has checked them once more, as before a sleep in poll. From then on the other end rings, which makes
//! the descriptor readable. tokio registers the descriptor for edges, and keeps a readiness until it is
//! cleared. It is cleared only before an attempt, so an edge after the last check always leads to
//! another one. That is the wait of the models in `crates/local/ring/tests/loom.rs`: `Doorbell::wait`
//! is this wait, and clears what it has found.
//!
//! Each future can be dropped at any time: an attempt is made in whole or not at all.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use shunt_sys::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

use crate::borrowed::Borrowed;
use crate::call::{CallError, Client, Numbered, Server};
use crate::error::{ReceiveError, SendError};
use crate::message::Message;
use crate::publisher::{Attended, Publisher};
use crate::receiver::{Event, Receiver};
use crate::sender::{Loan, Sender, Uncommitted};
use crate::subscriber::{Publication, SubscribeError, Subscriber};
use crate::wait::{PAUSE, Wait};

/// An end of a channel in a task of tokio: its calls wait without blocking the thread. It is registered
/// with the runtime in which it was made.
///
/// ```
/// use shunt_channel::{Async, Message, pair};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let (sender, receiver) = pair()?;
/// let (mut sender, mut receiver) = (Async::new(sender)?, Async::new(receiver)?);
/// let sending = tokio::spawn(async move { sender.send(b"hello", &[]).await });
/// let mut message = Message::new();
/// receiver.receive(&mut message).await?;
/// assert_eq!(message.bytes(), b"hello");
/// sending.await??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Async<T: sealed::End> {
    fd: AsyncFd<Registered<T>>,
}

mod sealed {
    use super::*;

    /// An end that keeps one descriptor open as long as it lives.
    pub trait End: AsFd {}
    impl End for Sender {}
    impl End for Receiver {}
    impl End for Client {}
    impl End for Server {}
    impl End for Publisher {}
    impl End for Subscriber {}
    impl End for BorrowedFd<'_> {}
}

#[derive(Debug)]
struct Registered<T>(T);

impl<T: AsFd> AsRawFd for Registered<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

#[allow(deprecated, reason = "`register` is unsafe for types that may close early; an `End` cannot")]
fn register<T: sealed::End>(end: T) -> io::Result<AsyncFd<Registered<T>>> {
    AsyncFd::with_interest(Registered(end), Interest::READABLE)
}

/// The outcome of one attempt.
enum Attempt<R> {
    Done(R),
    /// The other end rings from now on.
    Blocked,
    /// There is more to do now.
    Busy,
    /// The kernel accepts no descriptors now, and does not report when it does.
    Pause,
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::CANCELED)
}

impl<T: sealed::End> Async<T> {
    /// Registers an end with the current runtime, which has IO and time enabled.
    ///
    /// # Panics
    /// Outside of a runtime of tokio, as [`AsyncFd::new`] does.
    pub fn new(end: T) -> io::Result<Async<T>> {
        Ok(Async { fd: register(end)? })
    }

    /// Returns the end, for calls that do not wait.
    pub fn end(&mut self) -> &mut T {
        &mut self.fd.get_mut().0
    }

    /// Takes the end back.
    pub fn into_inner(self) -> T {
        self.fd.into_inner().0
    }

    /// Attempts until it is done.
    async fn until<R>(&mut self, mut attempt: impl FnMut(&mut T) -> Attempt<R>) -> Result<R, Errno> {
        loop {
            // A task whose end always has something to do lets others run.
            tokio::task::consume_budget().await;
            match attempt(&mut self.fd.get_mut().0) {
                Attempt::Done(result) => return Ok(result),
                Attempt::Blocked => {
                    let mut guard = self.fd.readable().await.map_err(|error| errno(&error))?;
                    guard.clear_ready_matching(Ready::ALL);
                }
                Attempt::Busy => {}
                Attempt::Pause => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}

/// Waits until a descriptor that is not registered is readable.
async fn readable(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let registered = register(fd).map_err(|error| errno(&error))?;
    registered.readable().await.map(drop).map_err(|error| errno(&error))
}

fn sent<R>(sender: &Sender, result: Result<R, SendError>) -> Attempt<Result<R, SendError>> {
    match result {
        Err(SendError::WouldBlock) if sender.must_pause() => Attempt::Pause,
        Err(SendError::WouldBlock) => Attempt::Blocked,
        result => Attempt::Done(result),
    }
}

impl Async<Sender> {
    /// Sends a message as [`Sender::send`] does. One that is longer than half of the ring is copied
    /// into a separate memfd.
    pub async fn send(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        self.send_gathered(&[IoSlice::new(bytes)], descriptors).await
    }

    /// Sends one message whose bytes are in several places, as [`send`](Self::send) does.
    pub async fn send_gathered(
        &mut self,
        pieces: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), SendError> {
        self.until(|sender| {
            let result = sender.send_gathered(pieces, descriptors, Wait::Never);
            sent(sender, result)
        })
        .await
        .map_err(SendError::System)?
    }

    /// Sends a message that is already in a memfd, as [`Sender::send_memory`] does.
    pub async fn send_memory(
        &mut self,
        memory: impl AsFd,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), SendError> {
        self.until(|sender| {
            let result = sender.send_memory(&memory, descriptors, Wait::Never);
            sent(sender, result)
        })
        .await
        .map_err(SendError::System)?
    }

    /// Returns memory for a message, as [`Sender::loan`] does.
    pub async fn loan(&mut self, len: usize) -> Result<Loan, SendError> {
        self.until(|sender| {
            let result = sender.loan(len, Wait::Never);
            sent(sender, result)
        })
        .await
        .map_err(SendError::System)?
    }

    /// Sends a loan, as [`Sender::commit`] does. A dropped future gives it back.
    pub async fn commit(&mut self, loan: Loan, descriptors: &[BorrowedFd<'_>]) -> Result<(), Uncommitted> {
        let mut loan = Some(loan);
        let result = self
            .until(|sender| {
                let result = match loan.take() {
                    Some(loan) => sender.commit(loan, descriptors, Wait::Never),
                    None => Ok(()),
                };
                let result = result.map_err(|failed| {
                    loan = Some(failed.loan);
                    failed.error
                });
                sent(sender, result)
            })
            .await;
        let error = match result {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(error) => SendError::System(error),
        };
        match loan {
            Some(loan) => Err(Uncommitted { error, loan }),
            None => Ok(()),
        }
    }
}

fn received<R>(result: Result<R, ReceiveError>) -> Attempt<Result<R, ReceiveError>> {
    match result {
        Err(ReceiveError::WouldBlock) => Attempt::Blocked,
        result => Attempt::Done(result),
    }
}

impl Async<Receiver> {
    /// Receives as [`Receiver::receive`] does.
    pub async fn receive(&mut self, message: &mut Message) -> Result<Event, ReceiveError> {
        self.until(|receiver| received(receiver.receive(message, Wait::Never)))
            .await
            .map_err(ReceiveError::System)?
    }

    /// Receives as [`Receiver::borrow`] does.
    pub async fn borrow(&mut self, borrowed: &mut Borrowed) -> Result<Event, ReceiveError> {
        self.until(|receiver| received(receiver.borrow(borrowed, Wait::Never)))
            .await
            .map_err(ReceiveError::System)?
    }
}

impl Async<Client> {
    /// Sends a request and waits for its response, as [`Client::call`] does. If the future is dropped,
    /// the response is discarded by a later call.
    pub async fn call(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        response: &mut Numbered,
    ) -> Result<(), CallError> {
        let number = self.request(bytes, descriptors).await?;
        while self.response(response).await? != number {}
        Ok(())
    }

    /// Sends a request as [`Client::request`] does.
    pub async fn request(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<u64, SendError> {
        loop {
            let client = self.end();
            match client.request(bytes, descriptors, Wait::Never) {
                Err(SendError::WouldBlock) if client.sender().must_pause() => tokio::time::sleep(PAUSE).await,
                Err(SendError::WouldBlock) => {
                    readable(client.sender().as_fd()).await.map_err(SendError::System)?;
                }
                result => return result,
            }
        }
    }

    /// Receives the next response, as [`Client::response`] does.
    pub async fn response(&mut self, response: &mut Numbered) -> Result<u64, CallError> {
        let system = |error| CallError::Receive(ReceiveError::System(error));
        self.until(|client| match client.response(response, Wait::Never) {
            Err(CallError::Receive(ReceiveError::WouldBlock)) => Attempt::Blocked,
            result => Attempt::Done(result),
        })
        .await
        .map_err(system)?
    }
}

impl Async<Server> {
    /// Receives the next request, as [`Server::receive`] does.
    pub async fn receive(&mut self, request: &mut Numbered) -> Result<(), ReceiveError> {
        self.until(|server| received(server.receive(request, Wait::Never)))
            .await
            .map_err(ReceiveError::System)?
    }

    /// Sends the response to a request, as [`Server::respond`] does. Waits as long as this client has no
    /// room for it; [`end`](Self::end) with [`Wait::Never`] does not.
    pub async fn respond(
        &mut self,
        request: &Numbered,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), SendError> {
        loop {
            let server = self.end();
            match (server.respond(request, bytes, descriptors, Wait::Never), server.sender_to(request)) {
                (Err(SendError::WouldBlock), Some(sender)) if sender.must_pause() => {
                    tokio::time::sleep(PAUSE).await;
                }
                (Err(SendError::WouldBlock), Some(sender)) => {
                    readable(sender.as_fd()).await.map_err(SendError::System)?;
                }
                (result, _) => return result,
            }
        }
    }
}

impl Async<Publisher> {
    /// Attends to the subscribers as [`Publisher::attend`] does, until there is one more or less.
    /// Messages are published by [`end`](Self::end), which does not wait.
    pub async fn attend(&mut self) -> Result<Attended, Errno> {
        self.until(|publisher| match publisher.attend_once() {
            Ok((attended, _)) if attended != Attended::default() => Attempt::Done(Ok(attended)),
            Ok((_, 0)) => Attempt::Blocked,
            Ok(_) => Attempt::Busy,
            Err(error) => Attempt::Done(Err(error)),
        })
        .await?
    }

    /// Attends to the subscribers until none is behind, as [`Publisher::flush`] does.
    pub async fn flush(&mut self) -> Result<(), Errno> {
        self.until(|publisher| {
            if !publisher.is_behind() {
                return Attempt::Done(Ok(()));
            }
            match publisher.turn_once() {
                Ok(0) => Attempt::Blocked,
                Ok(_) => Attempt::Busy,
                Err(error) => Attempt::Done(Err(error)),
            }
        })
        .await?
    }
}

impl Async<Subscriber> {
    /// Receives the next message, as [`Subscriber::receive`] does.
    pub async fn receive(&mut self, message: &mut Message) -> Result<Publication, SubscribeError> {
        self.next(|subscriber| subscriber.receive(message, Wait::Never)).await
    }

    /// Receives the next message, as [`Subscriber::borrow`] does.
    pub async fn borrow(&mut self, borrowed: &mut Borrowed) -> Result<Publication, SubscribeError> {
        self.next(|subscriber| subscriber.borrow(borrowed, Wait::Never)).await
    }

    async fn next(
        &mut self,
        mut attempt: impl FnMut(&mut Subscriber) -> Result<Publication, SubscribeError>,
    ) -> Result<Publication, SubscribeError> {
        let found = self.until(|subscriber| match attempt(subscriber) {
            Err(SubscribeError::Receive(ReceiveError::WouldBlock)) => Attempt::Blocked,
            result => Attempt::Done(result),
        });
        found.await.map_err(ReceiveError::System)?
    }
}
