//! How many of a client's messages have been dealt with, which its board says: the sockets that came with them have been closed again, so
//! that the program's own close ends them.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Mutex, MutexGuard};

use shunt_sys::mapping::Mapping;

/// The count for one client.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    ledger: Arc<Mutex<Ledger>>,
}

#[derive(Debug, Default)]
struct Ledger {
    board: Option<Arc<Mapping>>,
    /// Messages that have been looked at.
    looked_at: u64,
    /// Those whose sockets are still to be closed.
    open: BTreeSet<u64>,
}

/// Kept by whoever is to close the socket of a message, until it has.
#[derive(Debug)]
pub(crate) struct Receipt {
    ledger: Arc<Mutex<Ledger>>,
    message: u64,
}

impl Taken {
    /// Where it is to be said.
    pub(crate) fn set_board(&self, board: Arc<Mapping>) {
        lock(&self.ledger).board = Some(board);
    }

    /// A message has been looked at.
    pub(crate) fn advance(&self) {
        let mut ledger = lock(&self.ledger);
        ledger.looked_at += 1;
        ledger.publish();
    }

    /// For the socket of the message that is being looked at: it has not been dealt with as long as this is kept.
    pub(crate) fn receipt(&self) -> Receipt {
        let mut ledger = lock(&self.ledger);
        let message = ledger.looked_at + 1;
        ledger.open.insert(message);
        Receipt { ledger: self.ledger.clone(), message }
    }
}

impl Ledger {
    fn publish(&self) {
        let taken = self.open.first().map_or(self.looked_at, |oldest| oldest - 1);
        if let Some(board) = self.board.as_ref().and_then(|board| board.board()) {
            board.taken.store(taken, Release);
        }
    }
}

impl Drop for Receipt {
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
    fn a_message_is_dealt_with_once_its_socket_and_all_before_are_closed() {
        let (_, board) = memfd::create_sealed("shunt-board", BOARD_BYTES).unwrap();
        let board = Arc::new(board);
        let taken = Taken::default();
        taken.advance();
        taken.set_board(board.clone());
        let said = || board.board().unwrap().taken.load(Acquire);
        taken.advance();
        assert_eq!(said(), 2);
        let third = taken.receipt();
        taken.advance();
        taken.advance();
        let fifth = taken.receipt();
        assert_eq!(said(), 2);
        drop(third);
        assert_eq!(said(), 4, "the fifth is being looked at");
        taken.advance();
        assert_eq!(said(), 4);
        drop(taken);
        drop(fifth);
        assert_eq!(said(), 5, "whoever closes it says so, also when the client has gone");
    }
}
