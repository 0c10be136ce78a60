//! The messages of a conversation that are not answered yet, in the order in which the client sent them, which is the
//! order in which it gets its answers: one that comes early waits for its turn.

use std::collections::VecDeque;

use super::buffer::Buffer;
use super::limits;

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
    /// It is one of the messages that another one was split into.
    part: Option<Part>,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    index: usize,
    count: usize,
    /// Of the first: how many have no answer yet.
    open: usize,
    /// Of the first: bytes of all answers.
    size: usize,
}

/// What a client gets, or a part of it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) closes: bool,
}

/// Makes one answer of those to the parts of a message, or of none if they are more than [`limits::JOINED`] bytes. It is
/// given what was kept of the first part.
pub(crate) type Join<'a> = &'a dyn Fn(&[u8], Option<Vec<Answer>>) -> Answer;

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

    /// Whether the next answer to be sent is this one's, or waits for it.
    pub(crate) fn is_next(&self, turn: Turn) -> bool {
        let parts = self.queue.front().and_then(|message| message.part).map_or(1, |part| part.count);
        turn < self.first + parts as u64
    }

    /// A message that a backend will answer; `kept` is what is wanted of it if the backend does not.
    pub(crate) fn push(&mut self, kept: &[u8]) -> Turn {
        self.kept.push(kept);
        self.queue.push_back(Message { kept: kept.len(), attempts: 1, answer: None, part: None });
        self.first + self.queue.len() as u64 - 1
    }

    /// The same of each of the messages that one was split into. Gives the first's turn.
    pub(crate) fn push_parts<'a>(&mut self, kept: impl ExactSizeIterator<Item = &'a [u8]>) -> Turn {
        let (first, count) = (self.first + self.queue.len() as u64, kept.len());
        for (index, kept) in kept.enumerate() {
            self.push(kept);
            self.queue.back_mut().expect("just pushed").part =
                Some(Part { index, count, open: count, size: 0 });
        }
        first
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

    /// The answer to a message: to the output, if it is its turn. True if the client is to be closed after that.
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
            // Most are this, and are copied once.
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

    /// Takes the first message out, if it is answered: as a whole, if it was split.
    fn next(&mut self, join: Join<'_>) -> Option<Answer> {
        let Some(Part { count, open, size, .. }) = self.queue.front()?.part else { return self.pop() };
        if open > 0 {
            return None;
        }
        let kept = self.kept.as_slice()[..self.queue[0].kept].to_vec();
        let answers = (0..count).filter_map(|_| self.pop()).collect();
        Some(join(&kept, (size <= limits::JOINED).then_some(answers)))
    }

    /// Nobody wants the answers any more. Gives how many were still to come.
    pub(crate) fn forget(&mut self) -> usize {
        let open = self.queue.iter().filter(|message| message.answer.is_none()).count();
        *self = Waiting { first: self.first + self.queue.len() as u64, ..Waiting::default() };
        open
    }

    /// The first, if it is answered.
    fn pop(&mut self) -> Option<Answer> {
        let answer = self.queue.front_mut()?.answer.take()?;
        let message = self.queue.pop_front()?;
        self.held -= answer.bytes.len();
        self.kept.take(message.kept);
        self.first += 1;
        Some(answer)
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

    /// One after the other, in parentheses.
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
        // In any order: 7 has no divisor in common with 50.
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
            // In any order: 13 is a prime, and those that are not there are nobody's.
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
