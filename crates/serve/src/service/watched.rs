//! Notices a function of a service that does not return, such as one with an endless loop.
//!
//! Each thread counts its calls: an odd number means that it is inside of one. A watchdog reads the
//! numbers from time to time. A number that stays odd and equal is one call.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::contents::{Stored, Table};
use super::store::Session;
use super::{Answer, Joined, Parse, Properties, Refusal, Service, Share, Verdict};

/// A service whose calls a watchdog observes.
#[derive(Debug)]
pub struct Watched<S>(pub S);

/// The functions of a service, by the index in [`Calls::function`].
const FUNCTIONS: [&str; 12] = [
    "parse",
    "parse_reply",
    "decide",
    "refuse",
    "accepted",
    "part",
    "join",
    "timer",
    "service_timer",
    "closed",
    "started",
    "replied",
];

/// The calls of one thread.
#[derive(Debug, Default)]
struct Calls {
    /// Twice the number of finished calls, plus one during a call.
    number: AtomicU64,
    function: AtomicUsize,
}

static THREADS: Mutex<Vec<Arc<Calls>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<Option<Arc<Calls>>> = const { RefCell::new(None) };
}

/// The number of looks at a call until it counts as endless. A process that was stopped for some
/// time does not look meanwhile.
const LOOKS: u32 = 10;

/// Starts a thread that calls `hangs` with the name of each function that has not returned for
/// `limit`.
pub fn watch(limit: Duration, hangs: impl Fn(&'static str) + Send + 'static) -> std::io::Result<()> {
    let work = move || {
        let mut seen: Vec<(u64, u32)> = Vec::new();
        loop {
            std::thread::sleep(limit / LOOKS);
            let threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner).clone();
            seen.resize(threads.len(), (0, 0));
            for (calls, (number, looks)) in threads.iter().zip(&mut seen) {
                let now = calls.number.load(Acquire);
                *looks = if now == *number && now % 2 == 1 { *looks + 1 } else { 0 };
                *number = now;
                if *looks == LOOKS {
                    hangs(FUNCTIONS[calls.function.load(Relaxed)]);
                }
            }
        }
    };
    std::thread::Builder::new().name("watchdog".into()).spawn(work).map(drop)
}

/// Makes a call that the watchdog sees.
fn observed<T>(function: usize, call: impl FnOnce() -> T) -> T {
    OWN.with_borrow_mut(|own| {
        let own = own.get_or_insert_with(|| {
            let calls = Arc::new(Calls::default());
            THREADS.lock().unwrap_or_else(PoisonError::into_inner).push(calls.clone());
            calls
        });
        own.function.store(function, Relaxed);
        own.number.fetch_add(1, Release);
        let result = call();
        own.number.fetch_add(1, Release);
        result
    })
}

impl<S: Service> Service for Watched<S> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn properties(&self) -> Properties {
        self.0.properties()
    }

    fn parse(&self, bytes: &[u8]) -> Parse {
        observed(0, || self.0.parse(bytes))
    }

    fn parse_reply(&self, bytes: &[u8]) -> Parse {
        observed(1, || self.0.parse_reply(bytes))
    }

    fn decide_in(&self, session: &mut Session, message: &[u8]) -> Verdict {
        observed(2, || self.0.decide_in(session, message))
    }

    fn refuse_in(&self, session: &mut Session, head: &[u8], why: Refusal) -> Answer {
        observed(3, || self.0.refuse_in(session, head, why))
    }

    fn accepted_in(&self, session: &mut Session) -> Answer {
        observed(4, || self.0.accepted_in(session))
    }

    fn timer_in(&self, session: &mut Session, context: u64) -> Answer {
        observed(7, || self.0.timer_in(session, context))
    }

    fn service_timer(&self, context: u64) -> Answer {
        observed(8, || self.0.service_timer(context))
    }

    fn closed_in(&self, session: &mut Session) -> Answer {
        observed(9, || self.0.closed_in(session))
    }

    fn started(&self) -> Answer {
        observed(10, || self.0.started())
    }

    fn replied_in(&self, session: &mut Session, message: &[u8], reply: &[u8]) -> Answer {
        observed(11, || self.0.replied_in(session, message, reply))
    }

    fn stored(&self, stored: Stored) -> Vec<u8> {
        self.0.stored(stored)
    }

    fn put(&self, table: &Table, key: &[u8], content: Option<&[u8]>) -> bool {
        self.0.put(table, key, content)
    }

    fn part(&self, message: &[u8], share: &mut Share) -> Option<Vec<u8>> {
        observed(5, || self.0.part(message, share))
    }

    fn join(&self, answer: &[u8], share: &mut Share) -> Joined {
        observed(6, || self.0.join(answer, share))
    }
}

#[cfg(test)]
mod tests {
    use super::super::builtin;
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    #[test]
    fn only_a_call_that_does_not_return_is_reported() {
        let (tell, told) = channel();
        watch(Duration::from_millis(50), move |function| _ = tell.send(function)).unwrap();
        let service = Watched(builtin::named("echo").expect("a builtin").native);
        for _ in 0..1000 {
            assert_eq!(service.parse(b"some"), Parse::Message(4));
        }
        assert_eq!(told.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
        let (free, freed) = channel::<()>();
        let caller = std::thread::spawn(move || observed(2, || freed.recv()));
        assert_eq!(told.recv(), Ok("decide"));
        free.send(()).unwrap();
        caller.join().unwrap().unwrap();
    }
}
