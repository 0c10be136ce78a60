//! Answers that say less than TCP's did, and may be asked for again: nothing promises that what one process has done
//! shows in another before the call returns.

use shunt_differential::actor::Answer;
use shunt_differential::script::{Step, Verb};
use std::collections::BTreeMap;

/// Urgent data, which a receive that sleeps passes over as soon as it has the processor: until then it shows.
const URGENT: i64 = libc::POLLPRI as i64;
/// The same in the answer to a select.
const EXCEPTIONAL: i64 = 4;

/// Whether `answer` shows less than the model's, or urgent data that is about to be passed over.
pub(crate) fn is_late(step: &Step, model: &Answer, answer: &Answer) -> bool {
    match step.verb {
        Verb::Recv | Verb::OddRecv => {
            answer.ret < 0 && answer.errno == libc::EAGAIN && (model.ret >= 0 || model.errno != libc::EAGAIN)
        }
        Verb::Poll => {
            let urgent = if step.args[0] > 1 { EXCEPTIONAL } else { URGENT };
            let behind = |(must, is): (&i64, &i64)| must & !is != 0 || is & !must & urgent != 0;
            answer.ret >= 0 && model.extra.iter().zip(&answer.extra).any(behind)
        }
        // What some ways tell is only that something has come.
        Verb::Unseen => {
            let behind = |(must, is): (&i64, &i64)| must & !is != 0;
            model.ret != 0 && answer.ret == 0 || model.extra.iter().zip(&answer.extra).any(behind)
        }
        Verb::EpollWait => {
            let (model, found) = (pairs(model), pairs(answer));
            let of = |all: &BTreeMap<i64, i64>, data: &i64| all.get(data).copied().unwrap_or(0);
            answer.ret >= 0
                && (model.iter().any(|(data, must)| must & !of(&found, data) != 0)
                    || found.iter().any(|(data, is)| is & !of(&model, data) & URGENT != 0))
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
    found.values_mut().for_each(|events| *events &= !URGENT);
    found.retain(|_, events| *events != 0);
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
