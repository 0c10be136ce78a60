//! Starts the onward connection when the first packet of an intercepted connection arrives.
//!
//! netfilter passes each SYN to the relay before the host answers it:
//!
//! ```text
//! early      starts the onward connection, and lets the SYN continue
//! faithful   starts the onward connection, and holds the SYN until the target has answered;
//!            then the SYN continues, or is rejected, or is dropped
//! late       lets the SYN continue
//! ```
//!
//! For example, on an early route the target's handshake runs while the client's does. The accepted
//! connection then finds the onward connection in `Early` by its two addresses. A retransmitted SYN
//! is dropped if the first one is still held, and continues otherwise.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::config::{Intercept, Mode};
use crate::dial::{Onward, Request};
use crate::early::{Begun, Ends, Refusal};
use crate::frame::{Verdict, decode_reply};
use crate::intercept::Mark;
use crate::queue::{Fate, Packet, Queue};
use crate::shared::Shared;

/// The queue that the rules of [`crate::intercept`] name.
pub(crate) struct Syns {
    shared: Arc<Shared>,
    queue: AsyncFd<Queue>,
    marks: u32,
    /// SYNs that are held until the target has answered.
    held: HashMap<Ends, Packet>,
    answers: (mpsc::UnboundedSender<Answer>, mpsc::UnboundedReceiver<Answer>),
}

type Answer = (Ends, Verdict);

impl Syns {
    /// Opens the queue; needs CAP_NET_ADMIN, and a queue number that no other process uses.
    #[allow(deprecated, reason = "`register` is unsafe for types that may close early; this one cannot")]
    pub(crate) fn open(shared: Arc<Shared>, intercept: &Intercept) -> io::Result<Syns> {
        let queue = AsyncFd::new(Queue::bind(intercept.queue)?)?;
        let (marks, held, answers) = (intercept.mark, HashMap::new(), mpsc::unbounded_channel());
        Ok(Syns { shared, queue, marks, held, answers })
    }

    pub(crate) async fn watch(mut self) {
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                shown = self.queue.async_io(Interest::READABLE, Queue::receive) => match shown {
                    Ok(packets) => packets.into_iter().for_each(|packet| self.arrived(packet)),
                    Err(error) => return tracing::error!(%error, "SYNs are not shown any more"),
                },
                Some(answer) = self.answers.1.recv() => self.answered(answer),
                _ = tick.tick() => {
                    for _ in 0..self.shared.early.expire(Instant::now()) {
                        self.shared.metrics.count_early("expired");
                    }
                }
            }
        }
    }

    fn arrived(&mut self, packet: Packet) {
        let loaded = self.shared.loaded();
        let ends = ends(&packet.head);
        let route = ends.and_then(|(_, target)| loaded.config.route(target));
        let (Some(ends), Some(route)) = (ends, route) else {
            return self.decide(&packet, Fate::Pass(None));
        };
        // The first transmission is still held. It must keep its place: without a verdict it would
        // take room in the kernel's queue for as long as the relay runs.
        if self.held.contains_key(&ends) {
            self.shared.metrics.count_early("repeated");
            return self.decide(&packet, Fate::Drop);
        }
        let faithful = route.mode == Mode::Faithful;
        if self.shared.is_draining() || route.mode == Mode::Late {
            return self.decide(&packet, Fate::Pass(None));
        }
        let request = Request::new(ends.0, ends.1, route.source, route.via.clone());
        let begun = self.shared.early.begin(ends, || self.begin(request, faithful.then_some(ends)));
        self.shared.metrics.count_early(match begun {
            Ok(()) => "begun",
            Err(Refusal::Begun) => "repeated",
            Err(Refusal::TooMany) => "too-many",
        });
        match begun {
            Ok(()) if faithful => drop(self.held.insert(ends, packet)),
            _ => self.decide(&packet, Fate::Pass(None)),
        }
    }

    /// Starts to connect onward. `asked` is set on a faithful route: the task then also waits for
    /// the target's answer.
    fn begin(&self, request: Request, asked: Option<Ends>) -> Begun {
        let (sender, onward) = oneshot::channel();
        let (worker, since) = (self.shared.next_worker(), Instant::now());
        let (shared, answers) = (self.shared.clone(), self.answers.0.clone());
        self.shared.spawn(worker, async move {
            let dialed = request.dial(&shared, &[]);
            if let Some(ends) = asked {
                let answered = timeout(HOLD, async { answer(dialed.await).await }).await;
                let onward = answered.unwrap_or(Err(Verdict::TimedOut));
                let verdict = onward.as_ref().map_or_else(|verdict| *verdict, |_| Verdict::Connected);
                // The connection must be there before the verdict lets the client's SYN continue.
                let _ = sender.send(onward);
                let _ = answers.send((ends, verdict));
            } else {
                let _ = sender.send(dialed.await);
            }
        });
        Begun { worker, since, answered: asked.is_none().then_some(since), onward }
    }

    fn answered(&mut self, (ends, verdict): Answer) {
        let Some(packet) = self.held.remove(&ends) else { return };
        let marked = |mark: Mark| Fate::Pass(Some(mark.of(self.marks)));
        let fate = match verdict {
            Verdict::Connected => {
                self.shared.early.release(ends);
                return self.decide(&packet, Fate::Pass(None));
            }
            Verdict::Refused | Verdict::Denied | Verdict::Full | Verdict::Circle => marked(Mark::Refused),
            Verdict::Unreachable | Verdict::NoRelay => marked(Mark::Unreachable),
            // The target has not answered, so neither does the relay. The client retransmits its
            // SYN.
            Verdict::TimedOut => Fate::Drop,
        };
        self.shared.early.take(ends);
        self.shared.metrics.count(None, Mode::Faithful.label(), verdict);
        self.decide(&packet, fate);
    }

    fn decide(&self, packet: &Packet, fate: Fate) {
        if let Err(error) = self.queue.get_ref().decide(packet, fate) {
            tracing::warn!(%error, "a SYN stays in its queue");
        }
    }
}

impl Drop for Syns {
    /// The kernel drops the packets of a closed queue.
    fn drop(&mut self) {
        for ends in self.held.keys() {
            self.shared.early.release(*ends);
        }
    }
}

/// How long a SYN may be held. Later, even a patient client has stopped to retransmit it.
const HOLD: Duration = Duration::from_secs(130);

/// Waits for the verdict of the next relay, if `onward` leads to a relay.
async fn answer(onward: Result<Onward, Verdict>) -> Result<Onward, Verdict> {
    let wire = match onward? {
        Onward::Relay(wire) => wire,
        target => return Ok(target),
    };
    match wire.read_exact().await.map(decode_reply) {
        // The verdict has been read, so only the target's bytes follow.
        Ok(Ok(Verdict::Connected)) => Ok(Onward::Target(wire)),
        Ok(Ok(verdict)) => Err(verdict),
        _ => Err(Verdict::NoRelay),
    }
}

const TCP: u8 = 6;

/// Returns the source and the destination of a TCP packet.
fn ends(packet: &[u8]) -> Option<Ends> {
    let (from, to, rest): (IpAddr, IpAddr, &[u8]) = match packet.first()? >> 4 {
        4 if *packet.get(9)? == TCP => {
            let header = usize::from(packet[0] & 15) * 4;
            let address = |at: usize| Some(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?.into());
            (address(12)?, address(16)?, packet.get(header..)?)
        }
        // A packet with IPv6 extension headers is not recognised.
        6 if *packet.get(6)? == TCP => {
            let address = |at: usize| Some(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?.into());
            (address(8)?, address(24)?, packet.get(40..)?)
        }
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes(rest.get(at..at + 2)?.try_into().ok()?));
    Some((SocketAddr::new(from, port(0)?), SocketAddr::new(to, port(2)?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shunt_netns::Net;
    use tokio::runtime::Handle;

    use super::*;
    use crate::config::Loaded;

    /// Returns a SYN of the IPv4 address 10.0.0.1 for 10.3.0.2.
    fn syn() -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, TCP, 0, 0, 10, 0, 0, 1, 10, 3, 0, 2];
        packet.extend([0x9c, 0x40, 0, 80]);
        packet
    }

    #[tokio::test]
    async fn a_held_syn_stays_the_first_one_however_long_the_target_takes() {
        let text = "name = 'a'\n[intercept]\n[[route]]\nto = ['10.3.0.0/24']\nmode = 'faithful'\n";
        let loaded = Loaded::parse(text).unwrap();
        let intercept = loaded.config.intercept.clone().unwrap();
        let shared = Arc::new(Shared::new(loaded, vec![Handle::current()]));
        let (net, handle) = (Net::new(), Handle::current());
        let mut syns = net.inside(|| {
            let _entered = handle.enter();
            Syns::open(shared.clone(), &intercept).unwrap()
        });
        let ends = ends(&syn()).unwrap();
        syns.arrived(Packet { id: 1, head: syn() });
        assert_eq!(shared.early.expire(Instant::now() + Duration::from_secs(3600)), 0);
        // The client retransmits.
        syns.arrived(Packet { id: 2, head: syn() });
        assert_eq!(syns.held[&ends].id, 1);
        // The time of the client's handshake begins when its SYN continues.
        syns.answered((ends, Verdict::Connected));
        assert!(syns.held.is_empty());
        assert_eq!(shared.early.expire(Instant::now()), 0);
        assert_eq!(shared.early.expire(Instant::now() + Duration::from_secs(3600)), 1);
        // A closed queue holds no SYN.
        syns.arrived(Packet { id: 3, head: syn() });
        assert_eq!(syns.held[&ends].id, 3);
        drop(syns);
        assert_eq!(shared.early.expire(Instant::now() + Duration::from_secs(3600)), 1);
    }

    #[test]
    fn the_ends_of_a_packet_are_read() {
        let mut packet =
            vec![0x46, 0, 0, 44, 0, 0, 0, 0, 64, TCP, 0, 0, 10, 0, 0, 1, 10, 3, 0, 2, 1, 1, 1, 1];
        packet.extend([0x9c, 0x40, 0, 80]);
        let expected = ("10.0.0.1:40000".parse().unwrap(), "10.3.0.2:80".parse().unwrap());
        assert_eq!(ends(&packet), Some(expected));
        packet[9] = 17;
        assert_eq!(ends(&packet), None);
        let mut packet = vec![0x60, 0, 0, 0, 0, 20, TCP, 64];
        packet.extend("fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        packet.extend("fd00:3::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
        packet.extend([0x9c, 0x40, 0, 80]);
        let expected = ("[fd00::1]:40000".parse().unwrap(), "[fd00:3::2]:80".parse().unwrap());
        assert_eq!(ends(&packet), Some(expected));
    }

    proptest! {
        #[test]
        fn no_packet_is_too_strange(packet: Vec<u8>) {
            let _ = ends(&packet);
        }
    }
}
