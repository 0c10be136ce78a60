//! A client leaves nothing behind when it disconnects. The only test of its process, so that it can
//! count descriptors and mappings.

mod common;

use std::time::Duration;

use common::{Broker, eventually, loopback};
use shunt_sys::eventfd;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn shared_mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("/memfd:shunt-").count()
}

#[test]
fn clients_leave_neither_descriptors_nor_memory_behind() {
    let broker = Broker::start();
    drop(broker.process());
    eventually(|| broker.status().processes.is_empty());
    std::thread::sleep(Duration::from_millis(50));
    let before = (descriptors(), shared_mappings());
    for round in 0..20 {
        let (mut one, mut two) = (broker.process(), broker.process());
        one.doorbell(0, eventfd::create().unwrap());
        let mut sockets = Vec::new();
        for ticket in 0..70 {
            let (client, server) = loopback("127.0.0.1");
            one.offer(ticket, &client);
            two.offer(ticket, &server);
            one.offer(1000 + ticket, std::io::pipe().unwrap().0);
            sockets.push((client, server));
        }
        if round % 2 == 0 {
            one.sync();
            two.sync();
        }
    }
    eventually(|| broker.status().processes.is_empty() && broker.status().links == 0);
    eventually(|| (descriptors(), shared_mappings()) == before);
}
