//! Two relays find out that each has the key, before either acts on anything the other says. Both sign both nonces and
//! their own part, so that no proof can be sent back or used again.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::frame::{FrameError, HELLO, Hello};
use crate::key::{Key, nonce};

/// How long a stranger may take to show that it is none, and a relay to answer, besides the round trips.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

const PROOF: usize = 32;
/// What each signs besides: its part.
const CALLER: &[u8] = b"shunt relay caller";
const LISTENER: &[u8] = b"shunt relay listener";

/// As the side that has connected. `name` is its own.
pub(crate) async fn call(stream: &mut TcpStream, name: &str, key: &Key) -> Result<(), FrameError> {
    timeout(LIMIT, async {
        let ours = Hello { name: name.to_owned(), nonce: nonce() }.encode();
        stream.write_all(&ours).await?;
        let (theirs, _) = Hello::read(stream).await.map_err(turned_away)?;
        let mut proof = [0; PROOF];
        stream.read_exact(&mut proof).await?;
        if !key.verifies(&[LISTENER, &ours, &theirs], &proof) {
            return Err(FrameError::Stranger);
        }
        stream.write_all(&key.sign(&[CALLER, &ours, &theirs])).await?;
        Ok(())
    })
    .await
    .map_err(|_| too_late())?
}

/// As the side that listens: which of its peers it is. `known` finds the key by the name that the caller gives.
pub(crate) async fn listen<P>(
    stream: &mut TcpStream,
    name: &str,
    known: impl FnOnce(&str) -> Option<(P, Key)>,
) -> Result<P, FrameError> {
    timeout(LIMIT, async {
        let (theirs, hello) = Hello::read(stream).await?;
        let (peer, key) = known(&hello.name).ok_or(FrameError::Stranger)?;
        let ours: [u8; HELLO] = Hello { name: name.to_owned(), nonce: nonce() }.encode();
        let proof = key.sign(&[LISTENER, &theirs, &ours]);
        stream.write_all(&[&ours[..], &proof].concat()).await?;
        let mut proof = [0; PROOF];
        stream.read_exact(&mut proof).await?;
        if !key.verifies(&[CALLER, &theirs, &ours], &proof) {
            return Err(FrameError::Stranger);
        }
        Ok(peer)
    })
    .await
    .map_err(|_| too_late())?
}

/// A relay that does not know the name hangs up without a word.
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
    use tokio::net::TcpListener;

    use super::*;
    use crate::key;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    /// What becomes of both when the caller has one key and the listener another.
    async fn meet(
        callers: u8,
        listeners: u8,
        knows: bool,
    ) -> (Result<(), FrameError>, Result<(), FrameError>) {
        let (mut one, mut two) = pair().await;
        let (callers, listeners) = (key::of(callers), key::of(listeners));
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
        let (mut one, mut two) = pair().await;
        let listener = async {
            let done = listen(&mut two, "exit", |_| Some(((), key::of(1)))).await;
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
}
