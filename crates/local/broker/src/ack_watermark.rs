//! Counts the messages of a client that are completely processed, and publishes the count on its
//! board. Processed means that the broker has also closed the sockets that came with them. From
//! then on, the program's own close ends the connection.
//!
//! Example: of five messages the third and the fifth have a socket. The count stays at 2 until the
//! third socket is closed, and then at 4 until the fifth is closed.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Mutex, MutexGuard};

use shunt_sys::mapping::Mapping;

/// The count for one client.
#[derive(Debug, Default)]
pub(crate) struct AckWatermark {
    ledger: Arc<Mutex<Ledger>>,
}

#[derive(Debug, Default)]
struct Ledger {
    board: Option<Arc<Mapping>>,
    /// Messages that have been received and answered.
    answered: u64,
    /// Numbers of the messages whose sockets are still to be closed.
    open: BTreeSet<u64>,
}

/// Marks a message as unprocessed until it is dropped. The thread that closes the message's socket
/// holds it.
#[derive(Debug)]
pub(crate) struct PendingAck {
    ledger: Arc<Mutex<Ledger>>,
    message: u64,
}

impl AckWatermark {
    /// Sets the board on which the count is published.
    pub(crate) fn set_board(&self, board: Arc<Mapping>) {
        lock(&self.ledger).board = Some(board);
    }

    /// Counts a message as received and answered.
    pub(crate) fn advance(&self) {
        let mut ledger = lock(&self.ledger);
        ledger.answered += 1;
        ledger.publish();
    }

    /// Returns an ack for the socket of the present message.
    pub(crate) fn pending(&self) -> PendingAck {
        let mut ledger = lock(&self.ledger);
        let message = ledger.answered + 1;
        ledger.open.insert(message);
        PendingAck { ledger: self.ledger.clone(), message }
    }

    /// Returns whether a socket of a message is still to be closed.
    #[cfg(test)]
    pub(crate) fn is_pending(&self) -> bool {
        !lock(&self.ledger).open.is_empty()
    }
}

impl Ledger {
    fn publish(&self) {
        let acked = self.open.first().map_or(self.answered, |oldest| oldest - 1);
        if let Some(board) = self.board.as_ref().and_then(|board| board.board()) {
            board.taken.store(acked, Release);
        }
    }
}

impl Drop for PendingAck {
    fn drop(&mut self) {
        let mut ledger = lock(&self.ledger);
        ledger.open.remove(&self.message);
        ledger.publish();
    }
}

fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_abi::page::BOARD_BYTES;
    use shunt_sys::memfd;
    use std::sync::atomic::Ordering::Acquire;

    #[test]
    fn message_is_acked_once_its_socket_and_all_before_are_closed() {
        let (_, board) = memfd::create_sealed("shunt-board", BOARD_BYTES).unwrap();
        let board = Arc::new(board);
        let acks = AckWatermark::default();
        acks.advance();
        acks.set_board(board.clone());
        let published = || board.board().unwrap().taken.load(Acquire);
        acks.advance();
        assert_eq!(published(), 2);
        let third = acks.pending();
        acks.advance();
        acks.advance();
        let fifth = acks.pending();
        assert_eq!(published(), 2);
        drop(third);
        assert_eq!(published(), 4, "the fifth is not answered yet");
        acks.advance();
        assert_eq!(published(), 4);
        drop(acks);
        drop(fifth);
        assert_eq!(published(), 5, "the close publishes it, also when the client has gone");
    }
}
