//! The messages of a conversation that are not answered yet, in the order in which the client sent them, which is the
//! order in which it gets its answers: one that comes early waits for its turn.

use std::collections::VecDeque;

use super::buffer::Buffer;

/// Names a message of the conversation.
pub(crate) type Turn = u64;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    queue: VecDeque<Message>,
    /// Of the first in the queue.
    first: Turn,
    /// What is kept of the messages, one after another.
    kept: Buffer,
    /// Bytes of answers that wait for their turn.
    held: usize,
}

#[derive(Debug)]
struct Message {
    kept: usize,
    attempts: u8,
    answer: Option<Answer>,
}

#[derive(Debug)]
struct Answer {
    bytes: Vec<u8>,
    closes: bool,
}

impl Waiting {
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Bytes of memory, about.
    pub(crate) fn size(&self) -> usize {
        self.kept.len() + self.held + self.queue.len() * size_of::<Message>()
    }

    /// Bytes of answers that wait for their turn.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Whether the next answer to be sent is this one's.
    pub(crate) fn is_next(&self, turn: Turn) -> bool {
        turn == self.first
    }

    /// A message that a backend will answer; `kept` is what is wanted of it if the backend does not.
    pub(crate) fn push(&mut self, kept: &[u8]) -> Turn {
        self.kept.push(kept);
        self.queue.push_back(Message { kept: kept.len(), attempts: 1, answer: None });
        self.first + self.queue.len() as u64 - 1
    }

    /// What was kept of a message.
    pub(crate) fn kept(&self, turn: Turn) -> Option<&[u8]> {
        let at = self.place(turn)?;
        let before: usize = self.queue.iter().take(at).map(|message| message.kept).sum();
        Some(&self.kept.as_slice()[before..before + self.queue[at].kept])
    }

    /// One more attempt is made, and this is the how manieth.
    pub(crate) fn attempt(&mut self, turn: Turn) -> u8 {
        let Some(at) = self.place(turn) else { return u8::MAX };
        let message = &mut self.queue[at];
        message.attempts = message.attempts.saturating_add(1);
        message.attempts
    }

    /// An answer that no backend is asked for, after all that are under way. True if the client is to be closed now.
    pub(crate) fn push_answer(&mut self, bytes: &[u8], closes: bool, output: &mut Buffer) -> bool {
        let turn = self.push(&[]);
        self.answer(turn, bytes, closes, output)
    }

    /// The answer to a message: to the output, if it is its turn. True if the client is to be closed after that.
    pub(crate) fn answer(&mut self, turn: Turn, bytes: &[u8], closes: bool, output: &mut Buffer) -> bool {
        let Some(at) = self.place(turn) else { return false };
        if at > 0 {
            self.held += bytes.len();
            self.queue[at].answer = Some(Answer { bytes: bytes.to_vec(), closes });
            return false;
        }
        output.push(bytes);
        self.pop();
        if closes {
            return true;
        }
        while let Some(answer) = self.queue.front_mut().and_then(|message| message.answer.take()) {
            self.held -= answer.bytes.len();
            output.push(&answer.bytes);
            self.pop();
            if answer.closes {
                return true;
            }
        }
        false
    }

    /// Nobody wants the answers any more. Gives how many were still to come.
    pub(crate) fn forget(&mut self) -> usize {
        let open = self.queue.iter().filter(|message| message.answer.is_none()).count();
        *self = Waiting { first: self.first + self.queue.len() as u64, ..Waiting::default() };
        open
    }

    fn pop(&mut self) {
        if let Some(message) = self.queue.pop_front() {
            self.kept.take(message.kept);
            self.first += 1;
        }
    }

    /// In the queue. None if it was answered already.
    fn place(&self, turn: Turn) -> Option<usize> {
        let at = usize::try_from(turn.checked_sub(self.first)?).ok()?;
        self.queue.get(at).filter(|message| message.answer.is_none()).map(|_| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_leave_in_the_order_of_the_messages() {
        let (mut waiting, mut output) = (Waiting::default(), Buffer::default());
        let turns: Vec<Turn> = (0u8..50).map(|at| waiting.push(&[at; 3])).collect();
        // In any order: 7 has no divisor in common with 50.
        for step in 0..50usize {
            let at = (step * 7 + 3) % 50;
            assert_eq!(waiting.kept(turns[at]), Some(&[at as u8; 3][..]));
            assert!(!waiting.answer(turns[at], &[at as u8], false, &mut output));
            assert!(!waiting.answer(turns[at], b"again", false, &mut output));
        }
        assert_eq!(output.as_slice(), (0u8..50).collect::<Vec<_>>());
        assert!(waiting.is_empty() && waiting.held() == 0 && waiting.size() == 0);
    }

    #[test]
    fn what_closes_waits_for_its_turn_and_is_the_last() {
        let (mut waiting, mut output) = (Waiting::default(), Buffer::default());
        let turn = waiting.push(b"one");
        assert!(!waiting.push_answer(b"bye", true, &mut output));
        let late = waiting.push(b"two");
        assert!(waiting.answer(turn, b"1", false, &mut output));
        assert_eq!(output.as_slice(), b"1bye");
        assert!(waiting.kept(late).is_some());
        assert_eq!(waiting.forget(), 1);
        assert!(!waiting.answer(late, b"2", false, &mut output));
        assert_eq!(output.as_slice(), b"1bye");
    }
}
