//! Mutual authentication: two relays prove to each other that they have the shared key.
//!
//! ```text
//! caller                                       listener
//!   │── hello: name, nonce ─────────────────────►│ looks up the key by the name
//!   │◄── hello: name, nonce; proof ──────────────│ MAC over "listener", both hellos, binding
//!   │── proof ──────────────────────────────────►│ MAC over "caller", both hellos, binding
//! ```
//!
//! Neither side acts on the other's data before it has verified the other's proof. The nonces in
//! the hellos prevent a replay, and the role prevents that a proof is sent back. The binding is a
//! secret of the two ends of a TLS connection, so a man in the middle cannot forward a proof.

use std::time::Duration;

use tokio::time::timeout;

use crate::frame::{FrameError, HELLO, Hello};
use crate::wire::Wire;
use shunt_key::{Key, nonce};

/// How long each side may take for the whole handshake.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

const PROOF: usize = 32;
/// The role that each side includes in its proof.
const CALLER: &[u8] = b"shunt relay caller";
const LISTENER: &[u8] = b"shunt relay listener";

/// Authenticates as the side that has connected. `name` is the caller's own name.
pub(crate) async fn call(wire: &mut Wire, name: &str, key: &Key) -> Result<(), FrameError> {
    timeout(LIMIT, async {
        let ours = Hello { name: name.to_owned(), nonce: nonce() }.encode();
        wire.write_all(&ours).await?;
        let (theirs, _) = Hello::read(wire).await.map_err(turned_away)?;
        let (proof, binding) = (wire.read_exact::<PROOF>().await?, wire.binding());
        if !key.verifies(&[LISTENER, &ours, &theirs, &binding], &proof) {
            return Err(FrameError::Stranger);
        }
        wire.write_all(&key.sign(&[CALLER, &ours, &theirs, &binding])).await?;
        Ok(())
    })
    .await
    .map_err(|_| too_late())?
}

/// Authenticates as the side that listens, and returns the peer. `known` returns the peer and its
/// key for the name that the caller claims.
pub(crate) async fn listen<P>(
    wire: &mut Wire,
    name: &str,
    known: impl FnOnce(&str) -> Option<(P, Key)>,
) -> Result<P, FrameError> {
    timeout(LIMIT, async {
        let (theirs, hello) = Hello::read(wire).await?;
        let (peer, key) = known(&hello.name).ok_or(FrameError::Stranger)?;
        let ours: [u8; HELLO] = Hello { name: name.to_owned(), nonce: nonce() }.encode();
        let binding = wire.binding();
        let proof = key.sign(&[LISTENER, &theirs, &ours, &binding]);
        wire.write_all(&[&ours[..], &proof].concat()).await?;
        let proof = wire.read_exact::<PROOF>().await?;
        if !key.verifies(&[CALLER, &theirs, &ours, &binding], &proof) {
            return Err(FrameError::Stranger);
        }
        Ok(peer)
    })
    .await
    .map_err(|_| too_late())?
}

/// A relay that does not know the caller's name closes the connection. Such an end becomes a
/// specific error.
fn turned_away(error: FrameError) -> FrameError {
    match error {
        FrameError::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => FrameError::TurnedAway,
        other => other,
    }
}

fn too_late() -> FrameError {
    FrameError::Io(std::io::ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    async fn sealed(one: TcpStream, two: TcpStream) -> (Wire, Wire) {
        let both =
            tokio::join!(Wire::sealed(one, shunt_tls::caller()), Wire::sealed(two, shunt_tls::listener()));
        (both.0.unwrap(), both.1.unwrap())
    }

    /// Runs the handshake between a caller and a listener with these keys, and returns both
    /// results.
    async fn meet(
        callers: u8,
        listeners: u8,
        knows: bool,
    ) -> (Result<(), FrameError>, Result<(), FrameError>) {
        let (one, two) = pair().await;
        let (mut one, mut two) = (Wire::plain(one), Wire::plain(two));
        let (callers, listeners) = (Key::from([callers; 32]), Key::from([listeners; 32]));
        let known = |name: &str| (knows && name == "edge").then_some(((), listeners));
        tokio::join!(
            async {
                let done = call(&mut one, "edge", &callers).await;
                drop(one);
                done
            },
            async {
                let done = listen(&mut two, "exit", known).await;
                drop(two);
                done
            }
        )
    }

    #[tokio::test]
    async fn two_with_the_same_key_know_each_other() {
        assert!(matches!(meet(1, 1, true).await, (Ok(()), Ok(()))));
    }

    #[tokio::test]
    async fn two_with_different_keys_do_not() {
        let (caller, listener) = meet(1, 2, true).await;
        assert!(matches!(caller, Err(FrameError::Stranger)));
        assert!(listener.is_err());
    }

    #[tokio::test]
    async fn a_name_that_nobody_knows_is_told_nothing() {
        let (caller, listener) = meet(1, 1, false).await;
        assert!(matches!(caller, Err(FrameError::TurnedAway)));
        assert!(matches!(listener, Err(FrameError::Stranger)));
    }

    #[tokio::test]
    async fn a_proof_sent_back_proves_nothing() {
        let (mut one, two) = pair().await;
        let mut two = Wire::plain(two);
        let listener = async {
            let done = listen(&mut two, "exit", |_| Some(((), Key::from([1; 32])))).await;
            drop(two);
            done
        };
        let mirror = async {
            one.write_all(&Hello { name: "edge".into(), nonce: [0; 32] }.encode()).await.unwrap();
            let mut answer = [0; HELLO + PROOF];
            one.read_exact(&mut answer).await.unwrap();
            one.write_all(&answer[HELLO..]).await.unwrap();
            one.read(&mut [0; 1]).await
        };
        let (listened, _) = tokio::join!(listener, mirror);
        assert!(matches!(listened, Err(FrameError::Stranger)));
    }

    #[tokio::test]
    async fn the_same_key_is_known_under_tls() {
        let (one, two) = pair().await;
        let (mut one, mut two) = sealed(one, two).await;
        let known = |_: &str| Some(((), Key::from([1; 32])));
        let key = Key::from([1; 32]);
        let met = tokio::join!(call(&mut one, "edge", &key), listen(&mut two, "exit", known));
        assert!(matches!(met, (Ok(()), Ok(()))));
        one.write_all(b"to").await.unwrap();
        two.write_all(b"fro").await.unwrap();
        assert_eq!((two.read_exact().await.unwrap(), one.read_exact().await.unwrap()), (*b"to", *b"fro"));
    }

    /// A man in the middle has a connection with each side, and forwards everything that they send.
    #[tokio::test]
    async fn proofs_that_were_handed_on_prove_nothing() {
        let ((one, his), (hers, two)) = (pair().await, pair().await);
        let ((mut one, his), (hers, mut two)) = (sealed(one, his).await, sealed(hers, two).await);
        let between = async {
            let hello: [u8; HELLO] = his.read_exact().await?;
            hers.write_all(&hello).await?;
            let answer: [u8; HELLO + PROOF] = hers.read_exact().await?;
            his.write_all(&answer).await?;
            let proof: [u8; PROOF] = his.read_exact().await?;
            hers.write_all(&proof).await
        };
        let (key, known) = (Key::from([1; 32]), |_: &str| Some(((), Key::from([1; 32]))));
        let caller = async {
            let called = call(&mut one, "edge", &key).await;
            drop(one);
            called
        };
        let (called, between, _) = tokio::join!(caller, between, async {
            tokio::time::timeout(Duration::from_secs(1), listen(&mut two, "exit", known)).await
        });
        assert!(matches!(called, Err(FrameError::Stranger)));
        between.unwrap_err();
    }
}
