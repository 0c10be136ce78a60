//! Messages that the receiver copies out of the sender's memory by process_vm_readv(2). A packet has
//! their address and their descriptors. The receiver answers, because the sender must not change a
//! message before it was read; the sender waits for the answer to the fourth message before.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Result, ensure};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use rustix::net::{SendFlags, SocketType};
use rustix::process::{PTracer, set_ptracer};

use super::sockets::{self, Connection};
use super::{Receive, Send};

/// Messages that wait for their answers.
const DEPTH: u64 = 4;
const WORD: usize = size_of::<u64>();

pub(super) struct Sending {
    socket: OwnedFd,
    sent: u64,
}

impl Sending {
    pub(super) fn connect(path: &Path) -> Result<Sending> {
        // Yama lets a process read another one only if that process allows it.
        let _ = set_ptracer(PTracer::Any);
        Ok(Sending { socket: sockets::connect_to(SocketType::SEQPACKET, path)?, sent: 0 })
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if self.sent >= DEPTH {
            sockets::receive(&self.socket, &mut [0; 1], &mut Vec::new())?;
        }
        self.sent += 1;
        let words = [u64::from(std::process::id()), bytes.as_ptr().addr() as u64, bytes.len() as u64];
        let words: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        sockets::send(&self.socket, &[IoSlice::new(&words)], fds)?;
        Ok(())
    }
}

pub(super) struct Receiving(Connection);

impl Receiving {
    pub(super) fn listen(path: &Path) -> Result<Receiving> {
        Ok(Receiving(Connection::listen(SocketType::SEQPACKET, path)?))
    }
}

impl Receive for Receiving {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let socket = self.0.socket()?;
        let mut words = [0; 3 * WORD];
        let got = sockets::receive(socket, &mut words, fds)?;
        ensure!(got == words.len(), "a packet that is no address");
        let word = |index: usize| u64::from_ne_bytes(std::array::from_fn(|at| words[index * WORD + at]));
        let (pid, base, len) = (word(0), word(1) as usize, word(2) as usize);
        ensure!(len <= buffer.len(), "a message that is longer than any");
        let mut done = 0;
        while done < len {
            let here = &mut [IoSliceMut::new(&mut buffer[done..len])];
            let there = [RemoteIoVec { base: base + done, len: len - done }];
            let count = process_vm_readv(Pid::from_raw(pid as i32), here, &there)?;
            ensure!(count > 0, "memory that is not there");
            done += count;
        }
        // The sender of the last messages may have ended.
        let _ = rustix::net::send(socket, &[1], SendFlags::NOSIGNAL);
        Ok(len)
    }
}
