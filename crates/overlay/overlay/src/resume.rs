//! Resumes the work of this host's former router. Its supervisors run on, and show their listening
//! sockets to this router before it reports that it is ready and serves other routers.
//!
//! ```text
//! former router:  writes the ids of its supervisors to a file, each second
//! this router:    reads them ──► waits until each has come and shown its sockets ──► ready
//! supervisor:     Hello, with the number of its sockets ──► Listen, once for each
//! ```

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::config::Config;
use crate::lock::lock;
use crate::shared::Shared;

/// The time that supervisors may take. They look for a router each second.
const LIMIT: Duration = Duration::from_secs(3);
/// The interval at which the wait checks them.
const PAUSE: Duration = Duration::from_millis(5);

/// The process ids of the supervisors that the last router has had.
#[derive(Debug, Default)]
pub(crate) struct Former(BTreeSet<u32>);

impl Former {
    /// Reads the record. A router that is not found there has had none.
    pub(crate) fn read(config: &Config) -> Former {
        let content = std::fs::read(place(&config.control)).unwrap_or_default();
        Former(serde_json::from_slice(&content).unwrap_or_default())
    }

    /// Waits until all that still run have come back, or for [`LIMIT`].
    pub(crate) async fn await_return(mut self, shared: &Shared) {
        let deadline = Instant::now() + LIMIT;
        loop {
            self.0.retain(|process| !shared.registry.has_resumed(*process) && runs(*process));
            if self.0.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                let missing = self.0.len();
                tracing::warn!(missing, "supervisors of the former router have not come back yet");
                return;
            }
            sleep(PAUSE).await;
        }
    }
}

/// Records the present supervisors, if they have changed since the last record.
pub(crate) fn record(shared: &Shared) {
    let present = shared.registry.processes();
    let mut recorded = lock(&shared.recorded);
    if recorded.as_ref() == Some(&present) {
        return;
    }
    let path = place(&shared.loaded().config.control);
    let content = serde_json::to_vec(&present).expect("it has no maps");
    let new = path.with_extension("supervisors-new");
    match std::fs::write(&new, content).and_then(|()| std::fs::rename(&new, &path)) {
        Ok(()) => *recorded = Some(present),
        Err(error) => tracing::debug!(%error, "the supervisors cannot be recorded"),
    }
}

/// Returns a path in the directory of the control socket, which no container can see.
fn place(control: &Path) -> PathBuf {
    control.with_extension("supervisors")
}

fn runs(process: u32) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}
