//! Messages over iceoryx2: its publisher lends memory, and its subscriber reads in place. Both ends
//! spin, as its examples do, and yield after a while. An empty datagram has the descriptors.

#![allow(unsafe_code, reason = "iceoryx2 has no safe way to send a loan that is used again")]

use std::cell::RefCell;
use std::hint::spin_loop;
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use iceoryx2::node::Node;
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::port::update_connections::UpdateConnections;
use iceoryx2::prelude::*;
use iceoryx2::service::port_factory::PortFactory as _;
use iceoryx2::service::port_factory::publish_subscribe::PortFactory;
use rustix::thread::sched_yield;

use super::sockets::{self, Datagrams};
use super::{Ipc, Receive, Send, beside, pages};

type Port = ipc::Service;
type Service = PortFactory<Port, [u8], ()>;

/// Messages that may wait for the receiver, as our channel lends at a time.
const DEPTH: usize = 4;
/// The file that exists once the receiver has joined.
const JOINED: &str = "joined";
/// How long a message is sent again that no receiver gets.
const PATIENCE: Duration = Duration::from_secs(5);
/// Checks before the processor is yielded.
const SPINS: u32 = 2_000;

fn failed(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow!("iceoryx2: {error:?}")
}

/// Returns the only node of this process. Each new node looks for dead ones and removes their ports,
/// so as few as possible begin while others send.
fn node() -> Result<Rc<Node<Port>>> {
    thread_local!(static NODE: RefCell<Weak<Node<Port>>> = const { RefCell::new(Weak::new()) });
    if let Some(node) = NODE.with_borrow(Weak::upgrade) {
        return Ok(node);
    }
    set_log_level(LogLevel::Error);
    let node = Rc::new(NodeBuilder::new().create::<Port>().map_err(failed)?);
    NODE.set(Rc::downgrade(&node));
    Ok(node)
}

/// Opens the service of a meeting place, whose name is unique.
fn open(path: &Path) -> Result<(Rc<Node<Port>>, Service)> {
    let node = node()?;
    let name = path.display().to_string();
    let name = ServiceName::new(name.trim_start_matches('/')).map_err(failed)?;
    let service = node
        .service_builder(&name)
        .publish_subscribe::<[u8]>()
        .enable_safe_overflow(false)
        .history_size(0)
        .subscriber_max_buffer_size(DEPTH)
        .subscriber_max_borrowed_samples(2)
        .open_or_create()
        .map_err(failed)?;
    Ok((node, service))
}

pub(super) struct Sending {
    publisher: Publisher<Port, [u8], ()>,
    socket: UnixDatagram,
    number: u64,
    _node: Rc<Node<Port>>,
}

impl Sending {
    pub(super) fn connect(ipc: &Ipc) -> Result<Sending> {
        let (node, service) = open(&ipc.at)?;
        let publisher = service
            .publisher_builder()
            .initial_max_slice_len(ipc.size.max(1))
            .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
            .create()
            .map_err(failed)?;
        let socket = UnixDatagram::unbound()?;
        socket.connect(&ipc.at)?;
        // Until the subscriber has joined, messages are dropped that it has no room for.
        let joined = beside(&ipc.at, JOINED);
        while !joined.exists() {
            sched_yield();
        }
        Ok(Sending { publisher, socket, number: 0, _node: node })
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if !fds.is_empty() {
            sockets::send(&self.socket, &[IoSlice::new(&[])], fds)?;
        }
        // A message that no receiver has got is sent again: its subscriber is being connected.
        let begin = Instant::now();
        while self.publish(bytes)? == 0 {
            ensure!(begin.elapsed() < PATIENCE, "no receiver has got a message for {PATIENCE:?}");
            sched_yield();
        }
        self.number += 1;
        Ok(())
    }
}

impl Sending {
    /// Sends a message, and returns how many receivers have got it.
    fn publish(&self, bytes: &[u8]) -> Result<usize> {
        let sample = self.publisher.loan_slice_uninit(bytes.len()).map_err(failed)?;
        let mut sample = if self.number == 0 {
            sample.write_from_slice(bytes)
        } else {
            // SAFETY: mapped memory of bytes, which are zero or of an earlier message.
            unsafe { sample.assume_init() }
        };
        if self.number > 0 {
            pages::write(sample.payload_mut(), self.number);
        }
        sample.send().map_err(failed)
    }
}

pub(super) struct Receiving {
    subscriber: Subscriber<Port, [u8], ()>,
    socket: Datagrams,
    service: Service,
    joined: PathBuf,
    descriptors: usize,
    number: u64,
    _node: Rc<Node<Port>>,
}

impl Receiving {
    pub(super) fn listen(ipc: &Ipc) -> Result<Receiving> {
        let (node, service) = open(&ipc.at)?;
        let subscriber = service.subscriber_builder().create().map_err(failed)?;
        let socket = Datagrams::bind(&ipc.at)?;
        let (descriptors, joined) = (ipc.descriptors, beside(&ipc.at, JOINED));
        Ok(Receiving { subscriber, socket, service, joined, descriptors, number: 0, _node: node })
    }

    /// Joins the publisher, and lets it begin.
    fn join(&self) -> Result<()> {
        while self.service.dynamic_config().number_of_publishers() == 0 {
            sched_yield();
        }
        self.subscriber.update_connections().map_err(failed)?;
        std::fs::write(&self.joined, "")?;
        Ok(())
    }
}

impl Receive for Receiving {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        if self.number == 0 {
            self.join()?;
        }
        if self.descriptors > 0 {
            self.socket.receive(&mut Vec::new(), fds)?;
        }
        let mut spins = 0;
        let sample = loop {
            if let Some(sample) = self.subscriber.receive().map_err(failed)? {
                break sample;
            }
            spins += 1;
            if spins < SPINS { spin_loop() } else { sched_yield() }
        };
        let len = sample.len();
        if self.number == 0 {
            buffer[..len].copy_from_slice(&sample);
        } else {
            let word = |at: usize| Some(u64::from_ne_bytes(sample[at..at + 8].try_into().ok()?));
            ensure!(
                pages::are(len, self.number, word),
                "message {} with other words, {:?}",
                self.number,
                word(0)
            );
        }
        self.number += 1;
        Ok(len)
    }
}
