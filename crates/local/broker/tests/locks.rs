//! A program can hold the locks of its sockets and files for as long as it likes. For example, it
//! can hold that of a socket while the kernel waits for a page that the program sends. Such a lock
//! must not delay other clients of the broker. Needs root, for userfaultfd.

mod common;

use std::fs::{Permissions, set_permissions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use common::stuck::{PAGE, Stuck};
use common::{Broker, Process, addresses, eventually, loopback, still_serves};
use rustix::event::epoll;
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use shunt_abi::control::{Doorbell, Offer, Request};
use shunt_broker::Mode;
use shunt_sys::{eventfd, seqpacket};

/// Connects a process of another user.
fn process_of(broker: &Broker, user: u32) -> Process {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let user = Uid::from_raw(user);
            set_thread_res_uid(user, user, user).unwrap();
            broker.process()
        });
        thread.join().unwrap()
    })
}

#[test]
fn a_socket_whose_lock_is_held_holds_up_nobody() {
    for broker in [Broker::start(), Broker::start_unprivileged()] {
        let mut stranger = broker.process();
        let (client, mut server) = loopback("127.0.0.1");
        let own = addresses(&client);
        let stuck = Stuck::sending(&client);
        stranger.offer_as(1, &client, own);
        still_serves(&broker);
        // The offered socket can still be paired.
        let mut other = broker.process();
        other.offer(1, &server);
        stranger.expect_link();
        other.expect_link();
        other.expect_pair();
        drop(stuck);
        server.read_exact(&mut [0; PAGE]).unwrap();
    }
}

/// An epoll instance is locked while events are copied to its caller, and the last close of a file
/// in it waits for that lock. The program has closed its descriptors, so the broker holds the last
/// copies.
#[test]
fn what_is_in_a_set_that_is_locked_is_closed_by_nobody_that_others_wait_for() {
    let broker = Broker::start_with(|config| {
        config.mode = Mode::System;
        let directory = config.socket.parent().unwrap();
        set_permissions(directory, Permissions::from_mode(0o755)).unwrap();
    });
    let stranger = process_of(&broker, 65_534);
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let mut shown = Vec::new();
    let add = |fd: BorrowedFd<'_>| {
        epoll::add(&epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::OUT).unwrap();
    };
    for _ in 0..64 {
        let (client, server) = loopback("127.0.0.1");
        let bell = eventfd::create().unwrap();
        add(client.as_fd());
        add(bell.as_fd());
        shown.push((addresses(&client), client, server, bell));
    }
    let set = epoll.as_raw_fd();
    let stuck = Stuck::in_call(move |page| {
        // SAFETY: a page of ours, which outlives the call and has room for so many events.
        let count = unsafe { libc::epoll_wait(set, page.cast(), 100, -1) };
        assert!(count > 0, "{}", std::io::Error::last_os_error());
    });
    let said = Arc::new(AtomicUsize::new(0));
    let mut peers = Vec::new();
    for (ticket, ((local, remote), client, server, bell)) in shown.into_iter().enumerate() {
        let (control, said) = (stranger.socket.try_clone().unwrap(), said.clone());
        let say = move |request: Request, fd: BorrowedFd<'_>| {
            while seqpacket::send(&control, request.encode().as_bytes(), &[fd]).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        std::thread::spawn(move || {
            say(Offer::new(ticket as u64, local, remote).into(), client.as_fd());
            // Each doorbell replaces the previous one.
            say(Doorbell { slot: 0, pad: 0 }.into(), bell.as_fd());
            drop(say);
            said.fetch_add(1, SeqCst);
            // If the broker was faster, these are the last copies, and their close blocks.
            drop(client);
            drop(bell);
        });
        peers.push(server);
    }
    still_serves(&broker);
    eventually(|| said.load(SeqCst) == peers.len());
    drop(stranger);
    still_serves(&broker);
    drop(stuck);
}
