//! TLS 1.3 between two relays, or between two routers of an overlay.
//!
//! TLS provides secrecy only, with keys of this connection (forward secrecy). It authenticates no
//! side: the listener's public key is a raw one (RFC 7250), generated at each start, and the caller
//! does not verify it. The protocol inside authenticates both sides by a shared key. Its proofs
//! cover a secret of the two ends of this TLS connection ([`Session::secret`]). A man in the middle
//! has two TLS connections with two secrets, so it cannot forward a proof.
//!
//! ```text
//! caller                                                    listener
//!   │── ClientHello ──────────────────────────────────────────►│
//!   │◄── ServerHello, raw public key, its signature, Finished ─│
//!   │── Finished ─────────────────────────────────────────────►│
//!   ┆   both: secret(label) is the same here, and on no other connection
//!   │── HMAC(shared key, "caller" ‖ secret) ──────────────────►│   the protocol's own messages
//!   │◄── HMAC(shared key, "listener" ‖ secret) ────────────────│
//! ```

#![forbid(unsafe_code)]

mod ends;
mod session;

pub use ends::{FIRST_BYTE, caller, listener, prepare};
pub use rustls::Connection;
pub use session::{Session, Via};
