//! Forwards bytes in both directions after an upgrade. Each direction ends by itself.

use super::connection::{State, Tunnel};
use super::socket::{Output, Received, Socket};
use super::worker::{READ, Worker};
use crate::config::duration;

impl Worker {
    /// Takes a step of a tunnel.
    pub(super) fn tunnel(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        let State::Tunnel(Tunnel { upstream, client_has_ended, backend_has_ended }) = &mut client.state
        else {
            return false;
        };
        let backend = &mut self.upstreams[*upstream];
        let buffer = &mut self.scratch[..READ];
        let to_backend =
            forward(&mut client.socket, &mut backend.socket, &mut backend.output, client_has_ended, buffer);
        let to_client =
            forward(&mut backend.socket, &mut client.socket, &mut client.output, backend_has_ended, buffer);
        let are_over =
            *client_has_ended && *backend_has_ended && client.output.is_empty() && backend.output.is_empty();
        match (to_backend, to_client) {
            (Some(one), Some(other)) if !are_over => {
                if one || other {
                    client.deadline = self.now + duration(self.config.timeouts.tunnel);
                }
                one || other
            }
            _ => {
                let upstream = *upstream;
                self.close_upstream(upstream);
                self.clients[at].state = State::Closing;
                self.remove(at);
                false
            }
        }
    }
}

/// Forwards one direction, and returns whether anything was done, or `None` if it is broken.
fn forward(
    from: &mut Socket,
    to: &mut Socket,
    output: &mut Output,
    has_ended: &mut bool,
    buffer: &mut [u8],
) -> Option<bool> {
    let mut has_progress = output.flush(to).ok()?;
    if *has_ended {
        if has_progress && output.is_empty() {
            to.shut_down();
        }
        return Some(has_progress);
    }
    while output.is_empty() {
        match from.receive(buffer) {
            Received::Bytes(count) => {
                output.send(to, &buffer[..count]).ok()?;
                has_progress = true;
            }
            Received::Nothing => break,
            Received::End => {
                *has_ended = true;
                from.is_readable = false;
                to.shut_down();
                return Some(true);
            }
            Received::Failed => return None,
        }
    }
    Some(has_progress)
}
