//! Closes descriptors that clients have sent. The last close of a file can block for as long as its
//! owner likes. Examples are a TCP socket that lingers, a file of a FUSE server, and a file in an
//! epoll instance that is kept locked by a wait whose event buffer never becomes writable. A close
//! becomes the last one when other processes close their copies, so the broker cannot know in
//! advance. Therefore all are closed on the [threads](crate::errands) for calls that may block.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::socket_linger;

use crate::errands::Errands;
use crate::principal::Principal;
use crate::taken::Receipt;

/// Pending closes of one principal at which the broker stops reading its messages.
const BUSY: usize = 64;
/// Pending closes of one principal at which the broker refuses its connections.
const STUCK: usize = 256;

/// Closes descriptors without ever blocking the caller.
#[derive(Debug, Clone)]
pub(crate) struct Disposal {
    errands: Errands,
}

/// A descriptor that can be sent to a client.
pub(crate) trait Descriptor: AsFd + Debug {}

impl<T: AsFd + Debug> Descriptor for T {}

/// A stranger's descriptor that the broker keeps. On drop it is closed on another thread.
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

    /// Closes a TCP socket. The program's FIN may have to wait for this close, so the `receipt`
    /// reports it to the program. A socket that lingers has no receipt: the program must expect
    /// that the broker holds it for long (`may_be_held_by_broker` in the shim).
    pub(crate) fn close_tcp(&self, whose: Principal, socket: OwnedFd, receipt: Receipt) {
        let lingers = !matches!(socket_linger(&socket), Ok(None | Some(Duration::ZERO)));
        let receipt = (!lingers).then_some(receipt);
        self.errands.run(whose, move || {
            drop(socket);
            drop(receipt);
        });
    }

    /// Closes any other descriptor.
    pub(crate) fn close(&self, whose: Principal, fd: OwnedFd) {
        self.errands.run(whose, move || drop(fd));
    }

    /// Wraps a descriptor so that it is closed on another thread.
    pub(crate) fn keep(&self, whose: Principal, fd: OwnedFd) -> Kept {
        Kept { fd: Some(fd), whose, disposal: self.clone() }
    }

    /// Returns whether so many closes of a principal are pending that the broker should read no
    /// more from it.
    pub(crate) fn is_busy(&self, whose: Principal) -> bool {
        self.errands.pending(whose) >= BUSY
    }

    /// Returns whether so many closes of a principal are blocked that the broker should not serve
    /// it any more.
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
        // Other threads close the pipes while one is blocked. Then the end of the peer unblocks
        // that one too.
        settled(&errands, other, 0);
        settled(&errands, one, 1);
        assert!(!disposal.is_busy(one) && !disposal.is_stuck(one));
        drop(unread);
        settled(&errands, one, 0);
    }
}
