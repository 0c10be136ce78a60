//! Checks that the shim can map its memory in a program that has called mlockall and is near
//! RLIMIT_MEMLOCK.

use std::fs;
use std::sync::atomic::Ordering::Relaxed;

use shunt_sys::mapping::Shown;
use shunt_sys::memfd::create_sealed;

const LINK: usize = 32 << 20;

/// Drops CAP_IPC_LOCK, which allows a thread to exceed RLIMIT_MEMLOCK, for this thread.
fn drop_right_to_lock() {
    const CAP_IPC_LOCK: u32 = 14;
    let header = [0x2008_0522u32, 0];
    let mut sets = [0u32; 6];
    // SAFETY: the structures of version 3 of the call: a header, and two parts of three words.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[0] &= !(1 << CAP_IPC_LOCK);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}

fn kib_of_status(name: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_mapping_is_neither_locked_nor_filled_nor_refused() {
    // SAFETY: it changes how new mappings are made, and no memory.
    assert_eq!(unsafe { libc::mlockall(libc::MCL_FUTURE) }, 0);
    let locked = kib_of_status("VmLck:");
    let most = ((locked + 1024) << 10) as u64;
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: a plain call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
    drop_right_to_lock();
    let (file, mapping) = create_sealed("shunt-locked", LINK).unwrap();
    let shown = Shown::map(&file, LINK).unwrap();
    mapping.word(LINK - 8).unwrap().store(7, Relaxed);
    assert_eq!(shown.word(LINK - 8).unwrap().load(Relaxed), 7);
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let ours: Vec<&str> = smaps.split("memfd:shunt-locked").skip(1).collect();
    assert_eq!(ours.len(), 2);
    for one in ours {
        let field = |name: &str| one.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        assert_eq!(field("Rss:"), "4 kB");
        let flags = field("VmFlags:");
        assert!(!flags.contains("lo") && flags.contains("dd"), "{flags}");
    }
}
