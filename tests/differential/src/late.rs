//! Answers that say less than TCP's did, and may be asked for again: nothing promises that what one process has done
//! shows in another before the call returns.

use crate::actor::Answer;
use crate::script::{Step, Verb};
use std::collections::BTreeMap;

/// Whether `answer` shows less than the model's.
pub(crate) fn is_late(step: &Step, model: &Answer, answer: &Answer) -> bool {
    match step.verb {
        Verb::Recv | Verb::OddRecv => {
            answer.ret < 0 && answer.errno == libc::EAGAIN && (model.ret >= 0 || model.errno != libc::EAGAIN)
        }
        Verb::Poll => {
            answer.ret >= 0 && model.extra.iter().zip(&answer.extra).any(|(must, is)| must & !is != 0)
        }
        Verb::EpollWait => {
            let found = pairs(answer);
            answer.ret >= 0
                && pairs(model).iter().any(|(data, must)| must & !found.get(data).copied().unwrap_or(0) != 0)
        }
        Verb::Inq | Verb::Ask => answer.ret >= 0 && answer.extra < model.extra,
        Verb::GetOption => answer.ret >= 0 && answer.extra != model.extra && answer.extra.get(1) == Some(&0),
        _ => false,
    }
}

/// The answer to the same question later, with what was told before: an edge is told once.
pub(crate) fn join(step: &Step, before: &Answer, again: Answer) -> Answer {
    if step.verb != Verb::EpollWait || again.ret < 0 {
        return again;
    }
    let mut found = pairs(before);
    for (data, events) in pairs(&again) {
        *found.entry(data).or_default() |= events;
    }
    let extra = found.iter().flat_map(|(data, events)| [*data, *events]).collect();
    Answer { ret: found.len() as i64, extra, ..again }
}

/// Data and events of an epoll_wait.
pub(crate) fn pairs(answer: &Answer) -> BTreeMap<i64, i64> {
    let mut found = BTreeMap::new();
    for pair in answer.extra.chunks_exact(2) {
        *found.entry(pair[0]).or_default() |= pair[1];
    }
    found
}
