//! Closing what strangers sent. The last close of a descriptor can block for as long as its owner likes (a TCP socket that
//! lingers, a file of a FUSE server, whatever is in an epoll set that somebody keeps locked by a wait whose events have nowhere to
//! go), so all are closed as [errands](crate::errands). Whether a close is the last, and can block, may change until it is made.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::socket_linger;

use crate::errands::Errands;
use crate::principal::Principal;
use crate::taken::Receipt;

/// Closings of one principal that may be pending before nothing more is taken from it for the moment.
const BUSY: usize = 64;
/// And before it is not let in any more.
const STUCK: usize = 256;

/// Closes descriptors without ever blocking the caller.
#[derive(Debug, Clone)]
pub(crate) struct Disposal {
    errands: Errands,
}

/// What can be sent to a client.
pub(crate) trait Descriptor: AsFd + Debug {}

impl<T: AsFd + Debug> Descriptor for T {}

/// A stranger's descriptor that is kept for a while: wherever it is let go, it is closed elsewhere.
#[derive(Debug)]
pub(crate) struct Kept {
    fd: Option<OwnedFd>,
    whose: Principal,
    disposal: Disposal,
}

impl AsFd for Kept {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("there until it is dropped").as_fd()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.fd.take().into_iter().for_each(|fd| self.disposal.close(self.whose, fd));
    }
}

impl Disposal {
    pub(crate) fn new(errands: Errands) -> Disposal {
        Disposal { errands }
    }

    /// Closes a TCP socket. As its FIN may wait for that, its program is told by the receipt, but for one that lingers: of that it
    /// knows that it may be held for long (`may_be_held_by_broker` in the shim).
    pub(crate) fn close_tcp(&self, whose: Principal, socket: OwnedFd, receipt: Receipt) {
        let lingers = !matches!(socket_linger(&socket), Ok(None | Some(Duration::ZERO)));
        let receipt = (!lingers).then_some(receipt);
        self.errands.run(whose, move || {
            drop(socket);
            drop(receipt);
        });
    }

    /// Closes anything.
    pub(crate) fn close(&self, whose: Principal, fd: OwnedFd) {
        self.errands.run(whose, move || drop(fd));
    }

    /// Keeps something until it is let go.
    pub(crate) fn keep(&self, whose: Principal, fd: OwnedFd) -> Kept {
        Kept { fd: Some(fd), whose, disposal: self.clone() }
    }

    /// Whether so much of a principal's is pending that it should wait before it says more.
    pub(crate) fn is_busy(&self, whose: Principal) -> bool {
        self.errands.pending(whose) >= BUSY
    }

    /// Whether so much of a principal's is stuck that it is not served any more.
    pub(crate) fn is_stuck(&self, whose: Principal) -> bool {
        self.errands.pending(whose) >= STUCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errands::tests::settled;
    use crate::principal::tests::stranger;
    use socket2::SockRef;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    #[test]
    fn a_lingering_socket_does_not_hold_up_the_caller() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let unread = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 65_536]).is_ok() {}
        stream.set_nonblocking(false).unwrap();
        SockRef::from(&stream).set_linger(Some(Duration::from_secs(600))).unwrap();
        let errands = Errands::default();
        let (disposal, start) = (Disposal::new(errands.clone()), Instant::now());
        let (one, other) = (stranger(0, 7), stranger(0, 8));
        disposal.close(one, stream.into());
        for _ in 0..1000 {
            disposal.close(one, std::io::pipe().unwrap().0.into());
            disposal.close(other, std::io::pipe().unwrap().0.into());
        }
        assert!(start.elapsed() < Duration::from_secs(2));
        // The pipes are closed by other threads although one is stuck; then the peer's end frees that too.
        settled(&errands, other, 0);
        settled(&errands, one, 1);
        assert!(!disposal.is_busy(one) && !disposal.is_stuck(one));
        drop(unread);
        settled(&errands, one, 0);
    }
}
