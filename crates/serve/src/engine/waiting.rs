//! The queue of a conversation's unanswered messages, which restores the order of their answers.
//!
//! Clients get answers in the order of their messages, and an early answer waits for its turn. A
//! message that was split has one entry per part. Its answer is joined once all parts have theirs.

use std::collections::VecDeque;

use super::buffer::Buffer;
use super::limits;
use crate::service::Key;

/// The sequence number of a message within its conversation.
pub(crate) type Turn = u64;

/// The queue of unanswered messages.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    queue: VecDeque<Message>,
    /// The turn of the first message in the queue.
    first: Turn,
    /// The kept bytes of all messages, one after another.
    kept: Buffer,
    /// Bytes of early answers.
    held: usize,
}

#[derive(Debug)]
struct Message {
    kept: usize,
    attempts: u8,
    /// The key of its backend, if one has it.
    key: Option<Key>,
    answer: Option<Answer>,
    /// Set if the message is a part of a split message.
    part: Option<Part>,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    index: usize,
    count: usize,
    /// In the first part: how many parts have no answer yet.
    open: usize,
    /// In the first part: bytes of all answers.
    size: usize,
}

/// An answer to a client, or a part of one.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) closes: bool,
}

/// Joins the answers to the parts of a message. The answers are `None` if they exceed
/// [`limits::JOINED`] bytes. The first argument is the kept beginning of the first part.
pub(crate) type Join<'a> = &'a dyn Fn(&[u8], Option<Vec<Answer>>) -> Answer;

impl Waiting {
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns the approximate memory use, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.kept.len() + self.held + self.queue.len() * size_of::<Message>()
    }

    /// Returns the bytes of early answers.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Returns true if the next answer to the client is this turn's or needs it.
    pub(crate) fn is_next(&self, turn: Turn) -> bool {
        let parts = self.queue.front().and_then(|message| message.part).map_or(1, |part| part.count);
        turn < self.first + parts as u64
    }

    /// Appends a message that a backend will answer. `kept` are the bytes needed if it does not.
    pub(crate) fn push(&mut self, kept: &[u8]) -> Turn {
        self.kept.push(kept);
        self.queue.push_back(Message { kept: kept.len(), attempts: 1, key: None, answer: None, part: None });
        self.first + self.queue.len() as u64 - 1
    }

    /// Appends the parts of a split message. Returns the turn of the first.
    pub(crate) fn push_parts<'a>(&mut self, kept: impl ExactSizeIterator<Item = &'a [u8]>) -> Turn {
        let (first, count) = (self.first + self.queue.len() as u64, kept.len());
        for (index, kept) in kept.enumerate() {
            self.push(kept);
            self.queue.back_mut().expect("just pushed").part =
                Some(Part { index, count, open: count, size: 0 });
        }
        first
    }

    /// Returns the kept bytes of a message.
    pub(crate) fn kept(&self, turn: Turn) -> Option<&[u8]> {
        let at = self.place(turn)?;
        let before: usize = self.queue.iter().take(at).map(|message| message.kept).sum();
        Some(&self.kept.as_slice()[before..before + self.queue[at].kept])
    }

    /// Records the key of a message, so that the service need not decide about it again.
    pub(crate) fn set_key(&mut self, turn: Turn, key: Key) {
        if let Some(at) = self.place(turn) {
            self.queue[at].key = Some(key);
        }
    }

    /// Returns the key of a message.
    pub(crate) fn key(&self, turn: Turn) -> Option<&Key> {
        self.queue[self.place(turn)?].key.as_ref()
    }

    /// Counts one more attempt to send a message, and returns the number of attempts.
    pub(crate) fn attempt(&mut self, turn: Turn) -> u8 {
        let Some(at) = self.place(turn) else { return u8::MAX };
        let message = &mut self.queue[at];
        message.attempts = message.attempts.saturating_add(1);
        message.attempts
    }

    /// Adds an answer without a backend, after all pending ones. Returns true if the client must be
    /// closed now.
    pub(crate) fn push_answer(
        &mut self,
        bytes: &[u8],
        closes: bool,
        join: Join<'_>,
        output: &mut Buffer,
    ) -> bool {
        let turn = self.push(&[]);
        self.answer(turn, bytes, closes, join, output)
    }

    /// Adds the answer to a message, and moves every answer that is next in order to `output`.
    /// Returns true if the client must be closed after them.
    pub(crate) fn answer(
        &mut self,
        turn: Turn,
        bytes: &[u8],
        closes: bool,
        join: Join<'_>,
        output: &mut Buffer,
    ) -> bool {
        let Some(at) = self.place(turn) else { return false };
        let part = self.queue[at].part;
        if at == 0 && part.is_none() {
            // The common case: the answer is copied once, straight to the output.
            output.push(bytes);
            self.queue[0].answer = Some(Answer { bytes: Vec::new(), closes });
        } else {
            let first = part.and_then(|part| self.queue[at - part.index].part.as_mut());
            let is_too_long = first.is_some_and(|first| {
                first.open -= 1;
                first.size += bytes.len();
                first.size > limits::JOINED
            });
            let bytes = if is_too_long { Vec::new() } else { bytes.to_vec() };
            self.held += bytes.len();
            self.queue[at].answer = Some(Answer { bytes, closes });
        }
        while let Some(answer) = self.next(join) {
            output.push(&answer.bytes);
            if answer.closes {
                return true;
            }
        }
        false
    }

    /// Removes the first message if it is answered, or all parts of a split one.
    fn next(&mut self, join: Join<'_>) -> Option<Answer> {
        let Some(Part { count, open, size, .. }) = self.queue.front()?.part else { return self.pop() };
        if open > 0 {
            return None;
        }
        let kept = self.kept.as_slice()[..self.queue[0].kept].to_vec();
        let answers = (0..count).filter_map(|_| self.pop()).collect();
        Some(join(&kept, (size <= limits::JOINED).then_some(answers)))
    }

    /// Discards all messages. Returns how many had no answer.
    pub(crate) fn forget(&mut self) -> usize {
        let open = self.queue.iter().filter(|message| message.answer.is_none()).count();
        *self = Waiting { first: self.first + self.queue.len() as u64, ..Waiting::default() };
        open
    }

    /// Removes the first entry if it is answered.
    fn pop(&mut self) -> Option<Answer> {
        let answer = self.queue.front_mut()?.answer.take()?;
        let message = self.queue.pop_front()?;
        self.held -= answer.bytes.len();
        self.kept.take(message.kept);
        self.first += 1;
        Some(answer)
    }

    /// Returns the index of a turn in the queue, or `None` if it was answered.
    fn place(&self, turn: Turn) -> Option<usize> {
        let at = usize::try_from(turn.checked_sub(self.first)?).ok()?;
        self.queue.get(at).filter(|message| message.answer.is_none()).map(|_| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Concatenates the answers in parentheses.
    fn join(kept: &[u8], answers: Option<Vec<Answer>>) -> Answer {
        let parts = answers.map_or(vec![b"too long".to_vec()], |answers| {
            answers.into_iter().map(|answer| answer.bytes).collect()
        });
        Answer { bytes: [b"(", kept, &parts.concat(), b")"].concat(), closes: false }
    }

    #[test]
    fn answers_leave_in_the_order_of_the_messages() {
        let (mut waiting, mut output) = (Waiting::default(), Buffer::default());
        let turns: Vec<Turn> = (0u8..50).map(|at| waiting.push(&[at; 3])).collect();
        // Answer in a shuffled order: 7 and 50 are coprime.
        for step in 0..50usize {
            let at = (step * 7 + 3) % 50;
            assert_eq!(waiting.kept(turns[at]), Some(&[at as u8; 3][..]));
            assert!(!waiting.answer(turns[at], &[at as u8], false, &join, &mut output));
            assert!(!waiting.answer(turns[at], b"again", false, &join, &mut output));
        }
        assert_eq!(output.as_slice(), (0u8..50).collect::<Vec<_>>());
        assert!(waiting.is_empty() && waiting.held() == 0 && waiting.size() == 0);
    }

    #[test]
    fn what_closes_waits_for_its_turn_and_is_the_last() {
        let (mut waiting, mut output) = (Waiting::default(), Buffer::default());
        let turn = waiting.push(b"one");
        assert!(!waiting.push_answer(b"bye", true, &join, &mut output));
        let late = waiting.push(b"two");
        assert!(waiting.answer(turn, b"1", false, &join, &mut output));
        assert_eq!(output.as_slice(), b"1bye");
        assert!(waiting.kept(late).is_some());
        assert_eq!(waiting.forget(), 1);
        assert!(!waiting.answer(late, b"2", false, &join, &mut output));
        assert_eq!(output.as_slice(), b"1bye");
    }

    #[test]
    fn what_was_split_is_answered_as_a_whole() {
        for step in [1usize, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12] {
            let (mut waiting, mut output) = (Waiting::default(), Buffer::default());
            waiting.push(b"x");
            waiting.push_parts([&b"s"[..], b"p", b"l", b"t"].into_iter());
            waiting.push(b"y");
            let second = waiting.push_parts([&b"m"[..], b"n"].into_iter());
            waiting.push_parts([&b"o"[..]].into_iter());
            assert_eq!(second, 6);
            // Answer in a shuffled order: 13 is prime. Turns that do not exist are ignored.
            for at in (0..13).map(|at| at * step % 13) {
                assert_eq!(waiting.kept(at as Turn).is_some(), at < 9, "{at}");
                waiting.answer(at as Turn, &[b'0' + at as u8], false, &join, &mut output);
            }
            assert_eq!(output.as_slice(), b"0(s1234)5(m67)(o8)");
            assert!(waiting.is_empty() && waiting.held() == 0 && waiting.size() == 0);
        }
    }

    #[test]
    fn every_part_of_what_is_next_may_be_read() {
        let mut waiting = Waiting::default();
        waiting.push_parts([&b"a"[..], b"b"].into_iter());
        waiting.push(b"c");
        assert_eq!([0, 1, 2].map(|turn| waiting.is_next(turn)), [true, true, false]);
    }

    #[test]
    fn what_is_joined_is_bounded() {
        let (mut waiting, mut output) = (Waiting::default(), Buffer::default());
        waiting.push_parts((0..100).map(|_| &b"k"[..]));
        for turn in (0..100).rev() {
            waiting.answer(turn, &[7; limits::JOINED / 90], false, &join, &mut output);
            assert!(waiting.held() <= limits::JOINED);
        }
        assert_eq!(output.as_slice(), b"(ktoo long)");
        assert!(waiting.is_empty() && waiting.size() == 0);
    }
}
