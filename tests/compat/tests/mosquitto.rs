//! mosquitto: messages with acknowledgements, from one publisher to several subscribers.

use shunt_compat::{Expected, both};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const SUBSCRIBERS: usize = 4;
const MESSAGES: usize = 3000;

#[test]
fn every_subscriber_gets_every_message_in_order() {
    both(LIMIT, |host| {
        let port = host.port();
        let config = format!("listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n");
        let config = host.write("mosquitto.conf", config);
        let server = host.program("mosquitto").arg("-c").arg(config).start("mosquitto");
        host.wait_for_port(port);

        // The sessions outlive their connections: messages published before a subscriber returns
        // wait for it.
        let subscribe = |index: usize, more: &str| {
            host.program("mosquitto_sub")
                .words(&format!("-h 127.0.0.1 -p {port} -c -i subscriber{index} -q 1 -t news {more}"))
        };
        for index in 0..SUBSCRIBERS {
            assert!(subscribe(index, "-E").run("subscribe", LIMIT).success(), "{}", host.logs());
        }
        let transport = host.watch_transport();
        let subscribers: Vec<_> = (0..SUBSCRIBERS)
            .map(|index| subscribe(index, &format!("-C {MESSAGES}")).start(&format!("subscriber{index}")))
            .collect();
        let lines: String =
            (0..MESSAGES).map(|index| format!("message {index} {}\n", "x".repeat(index % 500))).collect();
        let publisher = host
            .program("mosquitto_pub")
            .words(&format!("-h 127.0.0.1 -p {port} -q 1 -t news -l"))
            .input(host.write("lines", &lines))
            .run("mosquitto_pub", LIMIT);
        assert!(publisher.success(), "{}", host.logs());
        for subscriber in subscribers {
            let subscriber = subscriber.wait(LIMIT);
            assert!(subscriber.success(), "{}", host.logs());
            assert!(subscriber.stdout == lines, "messages were lost, doubled or out of order");
        }
        transport.expect(Expected { port, connections: 1, share: 0.5 });
        drop(server);
    });
}
