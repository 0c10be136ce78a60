//! A process as /proc shows it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use shunt_abi::intercept::BELOW;
use shunt_abi::reason::Reason;
use shunt_abi::rules;
use shunt_abi::shown::visible;
use shunt_attach::View;
use shunt_sys::Errno;
use shunt_sys::proc::Fields;

use super::own_calls;
use super::report::Cause;
use crate::intercept;
use crate::obstacle::{self, Obstacle};

const LIBRARY: &str = "libshunt.so";
/// The auxiliary vector's entry that reports whether the dynamic linker is in secure mode.
const AT_SECURE: u64 = 23;

/// The state of a process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) uid: u32,
    /// Its effective user id.
    pub(super) acts_as: u32,
    pub(super) name: String,
    /// Whether the shim is loaded.
    pub(super) has_shim: bool,
    /// Why the shim is not loaded, or has no effect.
    pub(super) obstacle: Option<Obstacle>,
    /// Whether the libshunt.so that it has loaded was since replaced or removed.
    pub(super) shim_replaced: bool,
    /// The sockets at which it looks for its broker, as paths from this process. The preferred one
    /// is first.
    pub(super) broker_paths: Vec<PathBuf>,
    /// Why its shim is off, if it is.
    pub(super) off: Option<Reason>,
    /// Whether it was entered while it ran.
    is_entered: bool,
    /// Why its shim has not reached a broker, if an attempt has failed.
    unreached: Option<Errno>,
    /// Whether a broker has accepted it, or the process that forked it, as far as that is known.
    pub(super) has_registered: Option<bool>,
    /// The code for which its shim keeps all its connections on TCP, if it does.
    pub(super) own_calls: Option<own_calls::Place>,
    /// The io_uring of the process that hides the most from the shim.
    pub(super) ring: Ring,
    /// Whether it runs under a seccomp filter.
    filtered: bool,
    /// Its sockets: inodes and descriptors.
    pub(super) sockets: HashMap<u64, i32>,
    /// How many seconds ago it was started.
    pub(super) age: Option<u64>,
}

/// How a process uses io_uring, as far as /proc shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ring {
    None,
    /// Submissions are system calls. If the shim has seen its creation, this io_uring keeps no
    /// connection on TCP.
    Called,
    /// A kernel thread picks up the submissions (SQPOLL), so no system call announces them.
    Polled,
}

impl Process {
    /// Reads the process with this id.
    pub(super) fn look(pid: u32) -> Result<Process> {
        let status = Fields::status(pid).map_err(|_| anyhow!("there is no process {pid}"))?;
        let field = |name| status.get(name).unwrap_or_default();
        // A thread id stands for its process.
        let pid = status.word("Tgid", 0).unwrap_or(pid);
        let uid = status.word("Uid", 0).unwrap_or(0);
        let maps = fs::read_to_string(proc(pid, "maps"));
        let shim = maps.as_deref().ok().and_then(loaded_shim);
        let environment = Environment::of(pid);
        let (sockets, ring) = descriptors(pid);
        let view = shim.as_ref().and_then(|_| shunt_attach::view(pid));
        let off = match &view {
            Some(view) => view.off,
            None => (environment.transport(field("Name")) == Some(b"tcp")).then_some(Reason::Policy),
        };
        let obstacle = match (&shim, &maps) {
            (Some(_), Ok(maps)) if off.is_none() && !are_calls_led(pid, maps) => {
                obstacle::of_linkage(&proc(pid, "exe")).filter(|obstacle| *obstacle == Obstacle::Go)
            }
            (Some(_), _) => None,
            _ if field("State").starts_with('Z') => Some(Obstacle::Ended),
            (None, Err(_)) => Some(Obstacle::Hidden { uid }),
            (None, Ok(maps)) if maps.is_empty() => Some(Obstacle::Kernel),
            (None, Ok(_)) => Some(why_not_loaded(pid, &environment)),
        };
        Ok(Process {
            pid,
            uid,
            acts_as: status.word("Uid", 1).unwrap_or(uid),
            name: field("Name").to_owned(),
            has_shim: shim.is_some(),
            obstacle,
            shim_replaced: shim.is_some_and(|path| path.ends_with(" (deleted)")),
            broker_paths: broker_paths(pid, view.as_ref()),
            off,
            is_entered: view.as_ref().is_some_and(|view| view.is_entered),
            own_calls: view.as_ref().and_then(|view| view.bypasses).and_then(|address| {
                let program = fs::read_link(proc(pid, "exe")).ok();
                own_calls::Place::find(address, maps.as_deref().ok()?, program.as_deref())
            }),
            has_registered: view.as_ref().and_then(|view| view.has_registered),
            unreached: view.and_then(|view| view.unreached),
            ring,
            filtered: field("Seccomp") == "2",
            sockets,
            age: shunt_sys::proc::age(pid),
        })
    }

    /// Returns why the shim does not see the use of a connection.
    pub(super) fn unseen_use(&self) -> Obstacle {
        if self.is_entered { Obstacle::BeforeAttach } else { Obstacle::UnseenUse }
    }

    /// Returns why system calls that bypass the process's libc are not seen. `None` if it makes
    /// none.
    pub(super) fn hides_calls(&self) -> Option<Obstacle> {
        let maps = fs::read_to_string(proc(self.pid, "maps")).ok()?;
        let is_closed = || intercept::is_closed(&proc(self.pid, "exe"));
        (!are_calls_led(self.pid, &maps)).then(is_closed).flatten().map(Obstacle::OwnCalls)
    }

    /// Makes causes about calls that the shim cannot see name the code that can make them.
    pub(super) fn name_own_calls(&self, causes: &mut [Cause]) {
        if let Some(place) = &self.own_calls {
            causes.iter_mut().for_each(|cause| place.name_in(cause));
        }
    }

    /// Returns the error by which a seccomp filter seems to keep the shim from the broker. A filter
    /// alone means nothing: many services run under one that allows what the shim needs.
    pub(super) fn is_refused_by_filter(&self) -> Option<Errno> {
        let is_usual = |error: &Errno| matches!(*error, Errno::PERM | Errno::NOSYS | Errno::AFNOSUPPORT);
        self.unreached.filter(is_usual).filter(|_| self.filtered)
    }

    /// Returns whether only another user may use the broker's socket.
    pub(super) fn is_kept_from(&self, broker: &Path) -> bool {
        let is_others = |data: fs::Metadata| data.mode() & 0o002 == 0 && data.uid() != self.acts_as;
        self.acts_as != 0 && fs::metadata(broker).is_ok_and(is_others)
    }

    /// Returns whether the process has another root directory, which does not contain the broker's
    /// socket.
    pub(super) fn is_rooted_without(&self, broker: &Path) -> bool {
        let Ok(below) = broker.strip_prefix("/") else { return false };
        // A path through /proc already starts at the process's root directory.
        !broker.starts_with("/proc") && broker.exists() && !proc(self.pid, "root").join(below).exists()
    }

    /// Returns whether the process runs the program at `path`, or has the name `name`.
    pub(super) fn runs(pid: u32, path: Option<&Path>, name: &str) -> bool {
        let same_file = |path: &Path| {
            let (one, other) = (fs::metadata(path).ok()?, fs::metadata(proc(pid, "exe")).ok()?);
            Some((one.dev(), one.ino()) == (other.dev(), other.ino()))
        };
        path.and_then(same_file).unwrap_or(false)
            || fs::read_to_string(proc(pid, "comm")).is_ok_and(|comm| comm.trim_end() == name)
    }
}

fn proc(pid: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{name}"))
}

/// Returns the inodes and descriptors of the sockets that `pid` holds, and its io_uring that hides
/// the most.
pub(super) fn descriptors(pid: u32) -> (HashMap<u64, i32>, Ring) {
    let (mut sockets, mut ring) = (HashMap::new(), Ring::None);
    for entry in fs::read_dir(proc(pid, "fd")).into_iter().flatten().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        if target == "anon_inode:[io_uring]" {
            let is_polled = is_polled(pid, &entry.file_name().to_string_lossy());
            ring = ring.max(if is_polled { Ring::Polled } else { Ring::Called });
        }
        let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')?.parse().ok());
        let fd = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (Some(inode), Some(fd)) = (inode, fd) {
            sockets.entry(inode).or_insert(fd);
        }
    }
    (sockets, ring)
}

/// Returns whether a kernel thread picks up the submissions of this io_uring.
fn is_polled(pid: u32, ring: &str) -> bool {
    let fields = Fields::descriptor(pid, ring);
    fields.is_ok_and(|fields| fields.get("SqThread").is_some_and(|thread| thread != "-1"))
}

/// Returns whether a process has loaded the shim.
pub(crate) fn is_under_shunt(pid: u32) -> bool {
    // The path of a mapped file need not be UTF-8.
    fs::read(proc(pid, "maps")).is_ok_and(|maps| loaded_shim(&String::from_utf8_lossy(&maps)).is_some())
}

/// Returns the path of the shim among the mappings.
fn loaded_shim(maps: &str) -> Option<String> {
    let path = |line: &str| line.splitn(6, ' ').nth(5).map(|path| path.trim_start().to_owned());
    maps.lines().filter_map(path).find(|path| {
        let path = path.trim_end_matches(" (deleted)");
        path.rsplit('/').next() == Some(LIBRARY)
    })
}

/// Returns whether the system calls that bypass libc are redirected to the shim. A page below the
/// program's code contains the address that they are redirected to (`shunt_abi::intercept::Below`).
fn are_calls_led(pid: u32, maps: &str) -> bool {
    let is_shims = |address: u64| {
        let has_it = |line: &&str| range(line).is_some_and(|range| range.contains(&address));
        maps.lines().find(has_it).is_some_and(|line| loaded_shim(line).is_some())
    };
    let Ok(memory) = File::open(proc(pid, "mem")) else { return false };
    let begins = |line: &str| {
        let is_nameless = line.split_whitespace().count() == 5 && line.contains(" r--p ");
        range(line).filter(|_| is_nameless).map(|range| range.start)
    };
    maps.lines().filter_map(begins).any(|at| {
        let mut bytes = [0; 16];
        let is_read = memory.read_exact_at(&mut bytes, at).is_ok();
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
        is_read && word(8) == BELOW && is_shims(word(0))
    })
}

/// Returns the addresses of a mapping.
pub(super) fn range(line: &str) -> Option<Range<u64>> {
    let (from, to) = line.split_once(' ')?.0.split_once('-')?;
    Some(u64::from_str_radix(from, 16).ok()?..u64::from_str_radix(to, 16).ok()?)
}

fn why_not_loaded(pid: u32, environment: &Environment) -> Obstacle {
    let program = proc(pid, "exe");
    let linkage = obstacle::of_linkage(&program);
    // With another word size, the auxiliary vector has another format.
    if linkage != Some(Obstacle::OtherClass) && is_secure(pid) {
        return obstacle::of_secure_process(&program);
    }
    if let Some(obstacle) = linkage {
        return obstacle;
    }
    match environment.preloaded_shim() {
        Some(path) => {
            let seen = proc(pid, "root").join(path.strip_prefix("/").unwrap_or(&path));
            if seen.exists() { Obstacle::NotLoaded(path) } else { Obstacle::OutOfReach(path) }
        }
        None => match ancestor_with_shim(pid) {
            Some((ancestor, name)) => Obstacle::EnvironmentCleaned { ancestor, name },
            None => Obstacle::NotPreloaded,
        },
    }
}

/// Returns whether the process runs in the dynamic linker's secure mode.
fn is_secure(pid: u32) -> bool {
    let vector = fs::read(proc(pid, "auxv")).unwrap_or_default();
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).unwrap_or(0);
    vector.chunks_exact(16).any(|entry| word(&entry[..8]) == AT_SECURE && word(&entry[8..]) != 0)
}

fn ancestor_with_shim(pid: u32) -> Option<(u32, String)> {
    let mut pid = parent(pid)?;
    while pid > 1 {
        if Environment::of(pid).preloaded_shim().is_some() {
            let name = fs::read_to_string(proc(pid, "comm")).unwrap_or_default();
            return Some((pid, visible(name.trim_end()).into_owned()));
        }
        pid = parent(pid)?;
    }
    None
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(proc(pid, "stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Returns the paths, from this process, at which the shim of a process looks for its broker: those
/// that the shim shows, or if its memory may not be read, those of the environment.
///
/// If the process is in another mount namespace, the paths go through /proc.
pub(super) fn broker_paths(pid: u32, view: Option<&View>) -> Vec<PathBuf> {
    let paths = match view {
        Some(view) => view.brokers.clone(),
        None => Environment::of(pid).broker_paths(),
    };
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    if namespace(&pid.to_string()) == namespace("self") {
        return paths;
    }
    let seen = |path: PathBuf| proc(pid, "root").join(path.strip_prefix("/").unwrap_or(&path));
    paths.into_iter().map(seen).collect()
}

/// The longest program name that the kernel keeps, in bytes.
const KEPT: usize = 15;

/// The environment that a process was started with.
pub(super) struct Environment(Vec<u8>);

impl Environment {
    pub(super) fn of(pid: u32) -> Environment {
        Environment(fs::read(proc(pid, "environ")).unwrap_or_default())
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        let value = |entry| <[u8]>::strip_prefix(entry, name.as_bytes())?.strip_prefix(b"=");
        self.0.split(|byte| *byte == 0).find_map(value)
    }

    /// Returns whether the program has overwritten its environment, as some do to set a title for
    /// the process list.
    fn is_overwritten(&self) -> bool {
        !self.0.is_empty() && !self.0.contains(&b'=')
    }

    /// Returns the transport setting that the shim has received, for a program whose name is now
    /// `name`. The kernel truncates names.
    fn transport(&self, name: &str) -> Option<&[u8]> {
        let is_meant = |one: &[u8]| one.len().min(KEPT) == name.len() && one.starts_with(name.as_bytes());
        let own = self.get(shunt_abi::env::TRANSPORT);
        own.or_else(|| rules::value(self.get(shunt_abi::env::RULES)?, is_meant, "transport"))
    }

    /// Returns the shim's path in LD_PRELOAD.
    fn preloaded_shim(&self) -> Option<PathBuf> {
        let entries = self.get("LD_PRELOAD")?.split(|byte| b" :".contains(byte));
        let paths = entries.map(|entry| PathBuf::from(std::ffi::OsStr::from_bytes(entry)));
        paths.into_iter().find(|path| path.file_name().is_some_and(|name| name == LIBRARY))
    }

    /// Returns where a shim with this environment looks for the broker. If the environment is
    /// overwritten, the environment of this process is used instead.
    fn broker_paths(&self) -> Vec<PathBuf> {
        if self.is_overwritten() {
            return Environment::of(std::process::id()).broker_paths();
        }
        let path = |bytes| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
        match self.get(shunt_abi::env::BROKER) {
            Some(one) => vec![path(one)],
            None => {
                let own =
                    self.get("XDG_RUNTIME_DIR").map(|directory| path(directory).join("shunt/broker.sock"));
                own.into_iter().chain([shunt_broker::SYSTEM_SOCKET.into()]).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shim_is_found_among_the_mappings() {
        let line = "7f00-7f01 r-xp 00000000 fe:00 42                         /a b/libshunt.so";
        assert_eq!(loaded_shim(line).as_deref(), Some("/a b/libshunt.so"));
        assert_eq!(
            loaded_shim(&format!("x\n{line} (deleted)")).as_deref(),
            Some("/a b/libshunt.so (deleted)")
        );
        assert_eq!(
            loaded_shim("7f00-7f01 r-xp 00000000 fe:00 42  /lib/notlibshunt.so\n7f02-7f03 rw-p 0 0 0 0"),
            None
        );
    }

    #[test]
    fn the_environment_is_read_as_the_shim_reads_it() {
        let environment =
            Environment(b"A=1\0LD_PRELOAD=/x.so:/y/libshunt.so\0XDG_RUNTIME_DIR=/run/me\0".to_vec());
        assert_eq!(environment.preloaded_shim(), Some("/y/libshunt.so".into()));
        assert_eq!(
            environment.broker_paths(),
            [PathBuf::from("/run/me/shunt/broker.sock"), shunt_broker::SYSTEM_SOCKET.into()]
        );
        let environment = Environment(b"SHUNT_BROKER=/b\0".to_vec());
        assert_eq!(environment.broker_paths(), [PathBuf::from("/b")]);
        assert_eq!(environment.preloaded_shim(), None);
        // An overwritten environment contains nothing to read.
        let environment = Environment(vec![0; 40]);
        assert_eq!(environment.broker_paths(), Environment::of(std::process::id()).broker_paths());
        assert!(!Environment(Vec::new()).is_overwritten(), "it has none");
    }

    #[test]
    fn rules_are_for_the_program_of_their_name() {
        let environment =
            Environment(b"SHUNT_RULES=*:transport=auto;a-program-of-some-length:transport=tcp\0".to_vec());
        assert_eq!(environment.transport("a-program-of-so"), Some(&b"tcp"[..]));
        assert_eq!(environment.transport("a-program"), Some(&b"auto"[..]));
        let environment = Environment(b"SHUNT_RULES=*:transport=auto\0SHUNT_TRANSPORT=tcp\0".to_vec());
        assert_eq!(environment.transport("a"), Some(&b"tcp"[..]));
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        assert!(Process::look(u32::MAX).unwrap_err().to_string().contains("there is no process"));
        let me = Process::look(std::process::id()).unwrap();
        assert_eq!((me.uid, me.obstacle.is_some()), (rustix::process::geteuid().as_raw(), true));
    }
}
