//! The sockets that the program has for itself. The library takes over those that are TCP
//! connections (`earlier_connections` in the library).

use std::collections::BTreeMap;

use shunt_abi::plan::NO_MORE;

use crate::others::{Kind, Others};

/// The descriptors of one socket.
type Names = Vec<i32>;

/// Lists the sockets among the descriptors of the stopped program that no other process has. A
/// program with an io_uring has none: a request that it has submitted may be at work on any of them.
pub(crate) fn list(held: &[(i32, Kind)], others: &Others) -> Vec<Names> {
    let mut sockets: BTreeMap<u64, Names> = BTreeMap::new();
    for (fd, kind) in held {
        match kind {
            Kind::Ring => return Vec::new(),
            Kind::Socket(inode) if !others.sockets.contains(inode) => {
                sockets.entry(*inode).or_default().push(*fd);
            }
            Kind::Socket(_) | Kind::Instance => {}
        }
    }
    sockets.into_values().collect()
}

/// Returns the words in which the library reads the sockets. Those that do not fit into `room` words
/// are left out.
pub(crate) fn describe(sockets: &[Names], room: usize) -> Vec<u64> {
    let mut words = Vec::new();
    for names in sockets {
        if words.len() + 1 + names.len() >= room {
            break;
        }
        words.push(names.len() as u64);
        words.extend(names.iter().map(|fd| *fd as u64));
    }
    words.push(NO_MORE);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_the_program_alone_are_listed_with_their_descriptors() {
        let mut others = Others::default();
        others.sockets.insert(20);
        let held = [(3, Kind::Socket(10)), (4, Kind::Socket(20)), (5, Kind::Instance), (6, Kind::Socket(10))];
        assert_eq!(list(&held, &others), [[3, 6]]);
        assert_eq!(describe(&list(&held, &others), 4), [2, 3, 6, NO_MORE]);
        assert_eq!(describe(&list(&held, &others), 3), [NO_MORE]);
        let with_ring = [&held[..], &[(7, Kind::Ring)]].concat();
        assert!(list(&with_ring, &others).is_empty());
    }
}
