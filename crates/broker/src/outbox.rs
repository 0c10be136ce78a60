//! What the broker says to one client: sent at once where there is room, queued in order where there is not,
//! and never waited for.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::Release;

use shunt_abi::control::Reply;
use shunt_abi::page::Page;
use shunt_sys::mapping::Mapping;
use shunt_sys::{Errno, seqpacket};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

/// What stands between the queue and the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backlog {
    /// Nothing is queued.
    None,
    /// The socket is full: it will become writable.
    Full,
    /// The kernel is short of something (memory, descriptors in flight): nothing will announce a change.
    Short,
}

/// One client's socket and what is still to be sent on it.
#[derive(Debug)]
pub(crate) struct Outbox {
    socket: AsyncFd<OwnedFd>,
    page: RefCell<Option<Mapping>>,
    queue: RefCell<Queue>,
    limit: usize,
    sent: Cell<u64>,
    backlog: Cell<Backlog>,
    failed: Cell<bool>,
    changed: Notify,
}

/// Messages in order. A doorbell that replaces one still queued takes its place, so that no process can fill
/// the queue of another by registering doorbells.
#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<(Reply, Option<Rc<OwnedFd>>)>,
    /// Messages that have left.
    popped: u64,
    /// Where the doorbell of a peer's waiter stands, counted from the first message ever.
    doorbells: HashMap<(u64, u32), u64>,
}

impl Queue {
    fn push(&mut self, reply: Reply, fd: Option<Rc<OwnedFd>>) {
        if let Reply::PeerDoorbell(bell) = &reply {
            let place = self.popped + self.messages.len() as u64;
            if let Some(queued) = self.doorbells.get(&(bell.peer, bell.slot))
                && let Some(message) = self.messages.get_mut((queued - self.popped) as usize)
            {
                message.1 = fd;
                return;
            }
            self.doorbells.insert((bell.peer, bell.slot), place);
        }
        self.messages.push_back((reply, fd));
    }

    fn pop(&mut self) {
        if let Some((Reply::PeerDoorbell(bell), _)) = self.messages.pop_front() {
            self.doorbells.remove(&(bell.peer, bell.slot));
        }
        self.popped += 1;
    }
}

impl Outbox {
    pub(crate) fn new(socket: AsyncFd<OwnedFd>, limit: usize) -> Outbox {
        Outbox {
            socket,
            page: RefCell::new(None),
            queue: RefCell::default(),
            limit,
            sent: Cell::new(0),
            backlog: Cell::new(Backlog::None),
            failed: Cell::new(false),
            changed: Notify::new(),
        }
    }

    pub(crate) fn socket(&self) -> &AsyncFd<OwnedFd> {
        &self.socket
    }

    pub(crate) fn into_socket(self) -> OwnedFd {
        self.socket.into_inner()
    }

    /// The page whose inbox count follows what is sent.
    pub(crate) fn set_page(&self, page: Mapping) {
        *self.page.borrow_mut() = Some(page);
    }

    /// Shows the client's page, if it has one.
    pub(crate) fn with_page<T>(&self, look: impl FnOnce(&Page) -> T) -> Option<T> {
        self.page.borrow().as_ref().and_then(Mapping::page).map(look)
    }

    /// Says something, now or as soon as the client has read what came before.
    pub(crate) fn push(&self, reply: Reply, fd: Option<Rc<OwnedFd>>) {
        if self.failed.get() {
            return;
        }
        if self.queue.borrow().messages.len() >= self.limit {
            tracing::warn!(limit = self.limit, "client does not read its messages: dropped");
            return self.fail();
        }
        let idle = self.backlog.get() == Backlog::None;
        self.queue.borrow_mut().push(reply, fd);
        if idle && self.flush() != Backlog::None {
            self.changed.notify_one();
        }
    }

    /// Sends what the socket takes.
    pub(crate) fn flush(&self) -> Backlog {
        let mut queue = self.queue.borrow_mut();
        while let Some((reply, fd)) = queue.messages.front() {
            let datagram = reply.encode();
            let fds = fd.as_ref().map(|fd| fd.as_fd());
            match seqpacket::send(&self.socket, datagram.as_bytes(), fds.as_slice()) {
                Ok(()) => {
                    queue.pop();
                    self.sent.set(self.sent.get() + 1);
                    // After the datagram: a shim that sees the count finds the message.
                    self.with_page(|page| page.inbox.store(self.sent.get(), Release));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return self.stop_at(Backlog::Full),
                Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => {
                    return self.stop_at(Backlog::Short);
                }
                Err(error) => {
                    tracing::debug!(%error, "client cannot be written to");
                    drop(queue);
                    self.fail();
                    return self.stop_at(Backlog::None);
                }
            }
        }
        self.stop_at(Backlog::None)
    }

    fn stop_at(&self, backlog: Backlog) -> Backlog {
        self.backlog.set(backlog);
        backlog
    }

    fn fail(&self) {
        self.failed.set(true);
        *self.queue.borrow_mut() = Queue::default();
        self.changed.notify_one();
    }

    pub(crate) fn backlog(&self) -> Backlog {
        self.backlog.get()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.get()
    }

    /// Whether the client has yet to read something.
    pub(crate) fn is_unread(&self) -> bool {
        !self.queue.borrow().messages.is_empty()
            || seqpacket::unread(&self.socket).is_ok_and(|bytes| bytes > 0)
    }

    /// Waits until the backlog or the health of the client has changed.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_abi::control::{PeerDoorbell, PeerGone};
    use shunt_sys::eventfd;

    #[test]
    fn a_queued_doorbell_is_replaced_in_its_place() {
        let bell = |peer, slot| Reply::from(PeerDoorbell { peer, slot, pad: 0 });
        let fd = || Some(Rc::new(eventfd::create().unwrap()));
        let mut queue = Queue::default();
        queue.push(PeerGone { peer: 9 }.into(), None);
        queue.push(bell(1, 0), fd());
        queue.push(bell(1, 1), fd());
        queue.pop();
        let newer = fd();
        queue.push(bell(1, 0), newer.clone());
        assert_eq!(queue.messages.len(), 2);
        assert!(Rc::ptr_eq(queue.messages[0].1.as_ref().unwrap(), newer.as_ref().unwrap()));
        queue.pop();
        queue.push(bell(1, 0), fd());
        assert_eq!(
            queue.messages.iter().map(|(reply, _)| *reply).collect::<Vec<_>>(),
            [bell(1, 1), bell(1, 0)]
        );
        queue.pop();
        queue.pop();
        assert!(queue.doorbells.is_empty() && queue.messages.is_empty());
    }
}
