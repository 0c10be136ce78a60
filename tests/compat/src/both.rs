//! Runs the body of a test natively and under shunt, each with a time limit.

use crate::ground::Ground;
use crate::host::{Host, Mode};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Runs `body` natively, then under shunt, each within `limit`, and requires the same result.
///
/// If the environment has `COMPAT_ONLY=native` or `COMPAT_ONLY=shunt`, only that half runs. This is
/// for debugging.
pub fn both<T: Debug + PartialEq + Send + 'static>(
    limit: Duration,
    body: impl Fn(&Host) -> T + Clone + Send + 'static,
) {
    let only = std::env::var("COMPAT_ONLY").unwrap_or_default();
    let native = (only != "shunt").then(|| on_host(Mode::Native, limit, body.clone()));
    let shunt = (only != "native").then(|| on_host(Mode::Shunt, limit, body));
    if let (Some(native), Some(shunt)) = (native, shunt) {
        assert_eq!(native, shunt, "natively (left) and under shunt (right)");
    }
}

/// Runs both halves as [`both`] does, but in parallel: for programs that sleep most of the time.
pub fn both_at_once<T: Debug + PartialEq + Send + 'static>(
    limit: Duration,
    body: impl Fn(&Host) -> T + Clone + Send + 'static,
) {
    if std::env::var("COMPAT_ONLY").is_ok() {
        return both(limit, body);
    }
    let (native, shunt) = std::thread::scope(|scope| {
        let beside = body.clone();
        let native = scope.spawn(move || on_host(Mode::Native, limit, beside));
        let shunt = on_host(Mode::Shunt, limit, body);
        (native.join().unwrap_or_else(|panic| resume_unwind(panic)), shunt)
    });
    assert_eq!(native, shunt, "natively (left) and under shunt (right)");
}

/// Runs `body` under shunt only, within `limit`. Use it for tests without a native counterpart,
/// such as the broker's death.
pub fn under_shunt(limit: Duration, body: impl Fn(&Host) + Clone + Send + 'static) {
    if std::env::var("COMPAT_ONLY").is_ok_and(|only| only == "native") {
        return;
    }
    on_host(Mode::Shunt, limit, body);
}

/// Runs `body` on a new thread, which moves to the host's namespace. After `limit` all processes
/// there are killed, which ends any wait of the body.
fn on_host<T: Send + 'static>(mode: Mode, limit: Duration, body: impl Fn(&Host) -> T + Send + 'static) -> T {
    let (ground_sender, ground_receiver) = channel::<Arc<Ground>>();
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(|| {
            let ground = Arc::new(Ground::enter());
            let _ = ground_sender.send(ground.clone());
            let host = Host::new(mode, ground);
            let baseline = host.broker_descriptors();
            let result = body(&host);
            host.assert_broker_is_empty(baseline);
            host.finish();
            result
        }));
        let _ = sender.send(());
        result
    });
    let ground = ground_receiver.recv().ok();
    let in_time = receiver.recv_timeout(limit);
    if in_time == Err(RecvTimeoutError::Timeout) {
        eprintln!("{mode:?}: not done within {limit:?}: everything on the host is killed");
        if let Some(ground) = &ground {
            ground.kill_all();
        }
    }
    match thread.join() {
        Ok(Ok(result)) if in_time.is_ok() => result,
        Ok(Ok(_)) => panic!("{mode:?}: not done within {limit:?}"),
        Ok(Err(panic)) | Err(panic) => {
            eprintln!("the {mode:?} half failed");
            resume_unwind(panic)
        }
    }
}
