//! Compares docs/calls.md with the exports of this machine's glibc, with the hooks of libshunt.so,
//! and with calls.txt, which names the tests of each row.

use shunt_compat::Tools;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Function names without the affixes of their variants. Every function of glibc with such a stem
/// must have a row.
const STEMS: &str = "
    accept accept4 aio_cancel aio_error aio_fsync aio_init aio_read aio_return aio_suspend aio_write bind bindresvport
    clone close close_range closefrom closelog connect copy_file_range daemon dprintf dup dup2 dup3 epoll_create
    epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd_read eventfd_write execl execle execlp
    execv execve execveat execvp execvpe fallocate fanotify_init fanotify_mark fchdir fchmod fchown fclose fcloseall
    fcntl fdatasync fdelt fdopen fdopendir fexecve fgetxattr file_attach file_close file_fopen file_read file_write
    fileno fileno_unlocked flistxattr flock fork Fork forkpty fpathconf fremovexattr freopen fsetxattr fstat fstatat
    fstatfs fstatvfs fsync ftruncate futimens futimes fxstat fxstatat getaddrinfo getaddrinfo_a getdents getdirentries
    gethostbyaddr gethostbyaddr_r gethostbyname gethostbyname2 gethostbyname2_r gethostbyname_r getmsg getpeername
    getpmsg getsockname getsockopt inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl iruserok isatty
    isfdtype lio_listio listen llseek lockf login_tty lseek memfd_create mmap mq_close mq_getattr mq_notify mq_open
    mq_receive mq_send mq_setattr mq_timedreceive mq_timedsend openlog openpty pclose pidfd_getfd pidfd_open
    pidfd_send_signal pipe pipe2 poll popen posix_fadvise posix_fallocate posix_spawn posix_spawnp ppoll prctl pread preadv
    preadv2 preadv64v2 proc_close proc_open process_vm_readv process_vm_writev pselect putmsg putpmsg pwrite pwritev
    pwritev2 pwritev64v2 rcmd rcmd_af read readahead readv recv recvfrom recvmmsg recvmsg res_nclose res_nquery
    res_nquerydomain res_nsearch res_nsend res_query res_querydomain res_search res_send rexec rexec_af ruserok select
    send sendfile sendmmsg sendmsg sendto setns setsockopt shutdown signalfd sockatmark socket socketpair splice
    sync_file_range syncfs syscall syslog system tcdrain tcflow tcflush tcgetattr tcgetpgrp tcgetsid tcsendbreak
    tcsetattr tcsetpgrp tee timerfd_create timerfd_gettime timerfd_settime ttyname ttyname_r unshare vdprintf vfork
    vmsplice vsyslog write writev";

fn stem(name: &str) -> &str {
    let prefixes = ["__libc_", "_IO_", "__", "_"];
    let name = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    let name = ["_chk", "_2"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
    name.strip_suffix("64").unwrap_or(name)
}

/// Returns the tests of the rows, by the first function of each row.
fn tests() -> BTreeMap<&'static str, Vec<&'static str>> {
    let lines = include_str!("../calls.txt").lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split(' ');
            (words.next().expect("a function"), words.collect())
        })
        .collect()
}

/// A row of the page.
#[derive(Debug)]
struct Row {
    hook: bool,
    tests: Vec<&'static str>,
}

fn rows() -> BTreeMap<String, Row> {
    let mut rows = BTreeMap::new();
    let mut tests = tests();
    for line in include_str!("../../../docs/calls.md").lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let &[names, what] = &cells[..] else { panic!("not two cells: {line}") };
        let kinds = ["**handled**", "**back to TCP**", "**passed through**"];
        assert!(kinds.iter().any(|kind| what.starts_with(kind)), "says not what happens: {line}");
        let hook = !what.contains("no hook");
        assert!(hook || !what.starts_with("**back to TCP**"), "what would do that? {line}");
        let names = quoted(names);
        let tests = tests.remove(names[0].as_str()).unwrap_or_default();
        assert!(!tests.is_empty(), "calls.txt names no test: {line}");
        for name in names {
            let twice = rows.insert(name.clone(), Row { hook, tests: tests.clone() });
            assert!(twice.is_none(), "{name} has two rows");
        }
    }
    assert!(tests.is_empty(), "calls.txt has rows that docs/calls.md lacks: {tests:?}");
    assert!(rows.len() > 200, "only {} calls were found", rows.len());
    rows
}

/// Returns the parts of a cell between backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Returns the functions that a library exports, with their versions.
fn exports(library: &Path) -> Vec<(String, String)> {
    let output = Command::new("readelf").args(["-W", "--dyn-syms"]).arg(library).output().expect("readelf");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("names are ASCII");
    let function = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[_, _, _, kind, _, _, section, name, ..] = &fields[..] else { return None };
        let (name, version) = name.split_once('@').unwrap_or((name, ""));
        (matches!(kind, "FUNC" | "IFUNC") && section != "UND").then(|| (name.to_owned(), version.to_owned()))
    };
    text.lines().filter_map(function).collect()
}

/// Returns the path of the C library that the test itself uses.
fn glibc() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").expect("readable");
    let path =
        maps.lines().find_map(|line| line.split(' ').next_back().filter(|path| path.contains("/libc.so")));
    path.expect("tests are linked with glibc").into()
}

#[test]
fn every_function_of_glibc_that_meets_a_descriptor_has_a_row() {
    let rows = rows();
    let stems: BTreeSet<&str> = STEMS.split_whitespace().collect();
    let missing: BTreeSet<String> = exports(&glibc())
        .into_iter()
        .filter(|(_, version)| !version.contains("GLIBC_PRIVATE"))
        .map(|(name, _)| name)
        .filter(|name| stems.contains(stem(name)) || stems.contains(name.as_str()))
        .filter(|name| !rows.contains_key(name))
        .collect();
    assert!(missing.is_empty(), "docs/calls.md has no row for {missing:?}");
}

/// Symbols of libc that libshunt.so imports and never calls in a program without a libc: hooks of
/// libc's internal functions, imports of Rust's panic messages, and symbols with which the shim
/// identifies the libc.
const NOT_CALLED_WITHOUT_LIBC: &str = "_ITM_deregisterTMCloneTable _ITM_registerTMCloneTable __cxa_finalize \
    __cxa_thread_atexit_impl __gmon_start__ __xpg_strerror_r dl_iterate_phdr dlclose environ fflush fileno free \
    _r_debug fstat64 getcwd lseek64 malloc open64 pthread_key_delete readlink realloc realpath stat64 statx";

#[test]
fn what_libshunt_needs_of_libc_is_there_without_it() {
    let source = include_str!("../../../crates/local/shim/src/intercept/libc.rs");
    let has = |name: &str| source.contains(&format!("\n    {name} = "));
    let output = Command::new("nm")
        .args(["-D", "--undefined-only"])
        .arg(Tools::locate().library)
        .output()
        .expect("nm");
    let text = String::from_utf8(output.stdout).expect("names are ASCII");
    let needed: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().last()?.split('@').next())
        .filter(|name| !has(name) && !NOT_CALLED_WITHOUT_LIBC.split_whitespace().any(|one| one == *name))
        .collect();
    assert!(needed.is_empty(), "crates/local/shim/src/intercept/libc.rs has nothing for {needed:?}");
}

#[test]
fn the_page_knows_the_hooks_and_no_others() {
    let library = exports(&Tools::locate().library);
    // `shunt attach` calls the functions with the prefix.
    let is_hook = |name: &&str| !name.starts_with("shunt_");
    let hooks: BTreeSet<&str> = library.iter().map(|(name, _)| name.as_str()).filter(is_hook).collect();
    let rows = rows();
    let listed: BTreeSet<&str> =
        rows.iter().filter(|(_, row)| row.hook).map(|(name, _)| name.as_str()).collect();
    assert_eq!(listed, hooks, "docs/calls.md (left) and libshunt.so (right)");
}

#[test]
fn every_test_of_a_row_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let places = ["tests/compat/tests", "tests/differential/tests", "crates/cli/tests"];
    for (call, row) in rows() {
        for test in row.tests {
            let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("{test}: FILE::TEST"));
            let found = places.iter().any(|place| {
                let text =
                    fs::read_to_string(root.join(place).join(format!("{file}.rs"))).unwrap_or_default();
                // A test function, or a scenario of a macro that generates tests.
                text.contains(&format!("\nfn {name}()")) || text.contains(&format!("\n    {name}: "))
            });
            assert!(found, "{call}: there is no test {test}");
        }
    }
}
