//! Answers that contain less than TCP's, which the tester may request again. An effect of one
//! process need not be visible in another before the call returns.

use shunt_differential::actor::Answer;
use shunt_differential::script::{Step, Verb};
use std::collections::BTreeMap;

/// The event of urgent data, which a sleeping receive discards as soon as it runs; until then poll
/// reports it.
const URGENT: i64 = libc::POLLPRI as i64;
/// The event of urgent data in the answer to a select.
const EXCEPTIONAL: i64 = 4;

/// Returns whether `answer` contains less than the model's, or urgent data that is about to be
/// discarded.
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
        // Some ways report only that an event has come.
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

/// Returns the answer to a repeated question, joined with the one before: an edge is reported only
/// once.
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

/// Returns data and events of an epoll_wait.
pub(crate) fn pairs(answer: &Answer) -> BTreeMap<i64, i64> {
    let mut found = BTreeMap::new();
    for pair in answer.extra.chunks_exact(2) {
        *found.entry(pair[0]).or_default() |= pair[1];
    }
    found
}
