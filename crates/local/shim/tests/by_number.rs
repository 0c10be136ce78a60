//! Checks that each hook of a function that is a system call also answers the system call of that
//! name, as programs make it by `syscall` or without libc.

use std::fs;
use std::path::Path;

/// Hooked functions that are not system calls: functions of libc, or other names of system calls.
const OF_LIBC: &[&str] = &[
    "_Fork",
    "__poll_chk",
    "__ppoll_chk",
    "__read_chk",
    "__recv_chk",
    "__recvfrom_chk",
    "closefrom",
    "fclose",
    "fcntl64",
    "fdopen",
    "freopen",
    "freopen64",
    "mmap64",
    "posix_spawn",
    "posix_spawn_file_actions_adddup2",
    "posix_spawnp",
    "pselect",
    "pthread_cancel",
    "pthread_setcanceltype",
    "recv",
    "send",
    "sendfile64",
];

#[test]
fn every_hooked_function_that_is_a_system_call_has_its_hook_by_number_too() {
    let hooks = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/hooks");
    let by_number = fs::read_to_string(hooks.join("raw.rs")).unwrap();
    let mut seen = 0;
    for entry in fs::read_dir(&hooks).unwrap() {
        let path = entry.unwrap().path();
        let source = fs::read_to_string(&path).unwrap_or_default();
        for rest in source.split("\npub unsafe extern \"C-unwind\" fn ").skip(1) {
            let name = rest.split('(').next().unwrap();
            let number = format!("SYS_{name}");
            let has_hook = by_number
                .split(|end: char| !end.is_ascii_alphanumeric() && end != '_')
                .any(|word| word == number);
            assert!(
                has_hook || OF_LIBC.contains(&name),
                "{name} of {} has no hook in raw.rs",
                path.display()
            );
            seen += 1;
        }
    }
    assert!(seen > 40, "only {seen} functions were found");
}
