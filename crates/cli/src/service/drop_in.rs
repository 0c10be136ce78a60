//! The drop-in that puts a service under shunt: a pure function of the unit's properties.
//!
//! The shim needs the environment that `shunt run` sets. A hardened unit may also keep the shim
//! from being mapped, from calling the broker, or from seeing either of the two. The drop-in has an
//! addition only where the unit has such a setting.
//!
//! ```text
//! NoExecPaths=/                      ExecPaths=-/usr/lib/shunt/libshunt.so
//! RestrictAddressFamilies=AF_INET    RestrictAddressFamilies=AF_UNIX
//! SystemCallFilter=read write ...    SystemCallFilter=memfd_create ...
//! RootDirectory=/srv/a               BindReadOnlyPaths=-/usr/lib/shunt/libshunt.so -/run/shunt/broker
//! ```
//!
//! Each path has a `-`: without shunt, the service starts all the same.

use std::ffi::OsStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::unit::Properties;
use crate::library;

/// What a service needs of this installation.
#[derive(Clone, Debug)]
pub(super) struct Installed {
    /// The path of libshunt.so.
    pub(super) library: PathBuf,
    /// The broker's socket.
    pub(super) broker: PathBuf,
    /// The path of the command, for programs without a dynamic linker that the service starts.
    pub(super) command: Option<PathBuf>,
    /// The configuration's settings for programs.
    pub(super) rules: Option<String>,
}

/// The system calls of the shim. A filter that kills the process for one of them would end the
/// service.
const CALLS: [&str; 58] = [
    "clock_gettime",
    "clock_nanosleep",
    "close",
    "close_range",
    "connect",
    "dup",
    "dup3",
    "epoll_create1",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_wait",
    "eventfd2",
    "fcntl",
    "fstat",
    "fstatfs",
    "ftruncate",
    "futex",
    "geteuid",
    "getpeername",
    "getpid",
    "getppid",
    "getsockname",
    "getsockopt",
    "gettid",
    "getuid",
    "ioctl",
    "kcmp",
    "lseek",
    "madvise",
    "membarrier",
    "memfd_create",
    "mmap",
    "mprotect",
    "munmap",
    "nanosleep",
    "newfstatat",
    "openat",
    "poll",
    "ppoll",
    "prctl",
    "pread64",
    "preadv2",
    "prlimit64",
    "pwrite64",
    "read",
    "readlinkat",
    "recvfrom",
    "recvmsg",
    "rt_sigaction",
    "rt_sigprocmask",
    "sched_yield",
    "sendmsg",
    "sendto",
    "setsockopt",
    "socket",
    "sysinfo",
    "tgkill",
    "write",
];

/// Returns the settings of the drop-in, below `[Service]`, or why it cannot have any effect.
///
/// `previous` is the drop-in that the properties include already: what it has added stays.
pub(super) fn settings(
    unit: &Properties,
    ours: &Installed,
    previous: &str,
    resolve: &dyn Fn(&Path) -> PathBuf,
) -> Result<Vec<String>, String> {
    let mut lines = environment(unit, ours, previous, resolve)?;
    let mut add = |is_needed: bool, line: String| {
        if is_needed || previous.lines().any(|one| one == line) {
            lines.push(line);
        }
    };
    let exec = format!("ExecPaths=-{}", ours.library.display());
    add(!may_execute(unit, &ours.library, resolve), exec);
    add(!allows(unit, "RestrictAddressFamilies", "AF_UNIX"), "RestrictAddressFamilies=AF_UNIX".to_owned());
    let refused: Vec<&str> =
        CALLS.into_iter().filter(|call| !allows(unit, "SystemCallFilter", call)).collect();
    match (previous.lines().find(|line| line.starts_with("SystemCallFilter=")), &refused[..]) {
        (None, []) => {}
        // The unit was changed since then. A call that is named twice does no harm.
        (before, _) => {
            let before = before.and_then(|line| line.split_once('=')).map(|(_, calls)| calls).unwrap_or("");
            let calls: std::collections::BTreeSet<&str> = before.split_whitespace().chain(refused).collect();
            add(true, format!("SystemCallFilter={}", calls.into_iter().collect::<Vec<_>>().join(" ")));
        }
    }
    let directory = ours.broker.parent().unwrap_or(Path::new("/"));
    for path in [&*ours.library, directory] {
        let view = view(unit, path, resolve);
        if let View::Closed(setting) = view {
            return Err(format!("the unit hides {} by {setting}", path.display()));
        }
        // With its own process ids, the service trusts the socket only on a read-only mount.
        let is_elsewhere = path == directory && unit.is_yes("PrivatePIDs");
        add(view == View::Hidden || is_elsewhere, format!("BindReadOnlyPaths=-{}", path.display()));
    }
    Ok(lines)
}

/// Returns the text of the drop-in.
pub(super) fn text(name: &str, settings: &[String]) -> String {
    let name = name.trim_end_matches(".service");
    let mut text = format!(
        "# Written by `shunt service enable {name}`; `shunt service disable {name}` removes it.\n[Service]\n"
    );
    for line in settings {
        let _ = writeln!(text, "{line}");
    }
    text
}

fn environment(
    unit: &Properties,
    ours: &Installed,
    previous: &str,
    resolve: &dyn Fn(&Path) -> PathBuf,
) -> Result<Vec<String>, String> {
    use shunt_abi::env;
    const PRELOAD: &str = "LD_PRELOAD";
    let unset = unit.list("UnsetEnvironment");
    let is_ours = |name: &&String| {
        let name = name.split('=').next().unwrap_or(name);
        name == PRELOAD || name == env::BROKER
    };
    if let Some(name) = unset.iter().find(is_ours) {
        return Err(format!("the unit has UnsetEnvironment={name}"));
    }
    let existing = unit.variable(PRELOAD);
    let preload = library::preload(existing.as_deref().map(OsStr::new), &ours.library);
    let command = ours.command.as_ref().filter(|command| {
        // Without its own addition, the command may be executed as far as the unit says.
        may_execute(unit, command, resolve) && view(unit, command, resolve) == View::Seen
    });
    let values = [
        (PRELOAD, Some(preload.to_string_lossy().into_owned())),
        (env::BROKER, Some(ours.broker.display().to_string())),
        (env::INTERCEPT, command.map(|path| path.display().to_string())),
        (env::RULES, ours.rules.clone()),
    ];
    let mut lines = Vec::new();
    for (name, value) in values {
        let is_own = previous.lines().any(|line| line.starts_with(&format!("Environment=\"{name}=")));
        match value {
            // A user's own choice for the service goes first.
            Some(_) if name != PRELOAD && !is_own && unit.variable(name).is_some() => {}
            Some(value) => lines.push(format!("Environment=\"{name}={}\"", escape(&value))),
            None => {}
        }
    }
    Ok(lines)
}

/// Escapes a value for a setting in double quotes.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%")
}

/// Returns whether a list that allows or, with a `~`, forbids has an effect on `name`.
fn allows(unit: &Properties, property: &str, name: &str) -> bool {
    match unit.get(property) {
        None => true,
        Some(list) => match list.strip_prefix('~') {
            Some(forbidden) => !has(forbidden, name),
            None => has(list, name),
        },
    }
}

/// Returns whether a list has a name. An entry may have an error number: `read:EPERM`.
fn has(list: &str, name: &str) -> bool {
    list.split_whitespace().any(|entry| entry.split(':').next() == Some(name))
}

/// Returns whether the unit lets files at `path` be mapped as code. The longest of the paths that
/// hold it decides.
fn may_execute(unit: &Properties, path: &Path, resolve: &dyn Fn(&Path) -> PathBuf) -> bool {
    let longest = |property| {
        let paths = paths(unit, property, resolve).into_iter();
        paths.filter(|above| path.starts_with(above)).map(|above| above.components().count()).max()
    };
    longest("NoExecPaths") <= longest("ExecPaths")
}

/// Returns the paths of a property, without the signs before them and what follows a colon.
fn paths(unit: &Properties, property: &str, resolve: &dyn Fn(&Path) -> PathBuf) -> Vec<PathBuf> {
    let path = |entry: &String| {
        let path = entry.trim_start_matches(['-', '+']);
        resolve(Path::new(path.split(':').next().unwrap_or(path)))
    };
    unit.list(property).iter().map(path).collect()
}

/// How a service sees a path of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum View {
    Seen,
    /// It is not there, and can be mounted there.
    Hidden,
    /// Nothing can be mounted there, because of this setting.
    Closed(String),
}

fn view(unit: &Properties, path: &Path, resolve: &dyn Fn(&Path) -> PathBuf) -> View {
    let is_below = |directories: &[&str]| directories.iter().any(|above| path.starts_with(above));
    // A mount of the unit's own shows it, whatever is around.
    for property in ["BindPaths", "BindReadOnlyPaths"] {
        let shown = unit.list(property).into_iter().any(|entry| {
            let mut parts = entry.trim_start_matches(['-', '+']).split(':');
            let source = parts.next().unwrap_or_default();
            let at = parts.next().unwrap_or(source);
            source == at && path.starts_with(at)
        });
        if shown {
            return View::Seen;
        }
    }
    if let Some(above) =
        paths(unit, "InaccessiblePaths", resolve).iter().find(|above| path.starts_with(above))
    {
        return View::Closed(format!("InaccessiblePaths={}", above.display()));
    }
    let home = ["/home", "/root", "/run/user"];
    match unit.get("ProtectHome") {
        Some("yes") if is_below(&home) => return View::Closed("ProtectHome=yes".into()),
        Some("tmpfs") if is_below(&home) => return View::Hidden,
        _ => {}
    }
    let has_root = |name| unit.get(name).is_some_and(|root| !matches!(root, "" | "/"));
    let is_covered = paths(unit, "TemporaryFileSystem", resolve).iter().any(|above| path.starts_with(above));
    let has_tmp = !matches!(unit.get("PrivateTmp"), None | Some("no"));
    match has_root("RootDirectory")
        || has_root("RootImage")
        || is_covered
        || has_tmp && is_below(&["/tmp", "/var/tmp"])
    {
        true => View::Hidden,
        false => View::Seen,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: &str = "/usr/lib/shunt/libshunt.so";

    fn installed() -> Installed {
        Installed {
            library: LIBRARY.into(),
            broker: "/run/shunt/broker/broker.sock".into(),
            command: Some("/usr/bin/shunt".into()),
            rules: None,
        }
    }

    fn of(properties: &str, ours: &Installed, previous: &str) -> Result<Vec<String>, String> {
        settings(&Properties::parse(properties), ours, previous, &Path::to_owned)
    }

    /// Returns the settings other than the environment.
    fn additions(properties: &str) -> Vec<String> {
        let lines = of(properties, &installed(), "").unwrap();
        lines.into_iter().filter(|line| !line.starts_with("Environment=")).collect()
    }

    #[test]
    fn an_open_unit_gets_the_environment_only() {
        assert_eq!(
            of("Id=a.service\n", &installed(), "").unwrap(),
            [
                "Environment=\"LD_PRELOAD=/usr/lib/shunt/libshunt.so\"",
                "Environment=\"SHUNT_BROKER=/run/shunt/broker/broker.sock\"",
                "Environment=\"SHUNT_INTERCEPT=/usr/bin/shunt\"",
            ]
        );
    }

    #[test]
    fn each_hardening_has_its_addition_and_only_where_it_hinders() {
        let exec = format!("ExecPaths=-{LIBRARY}");
        let library = format!("BindReadOnlyPaths=-{LIBRARY}");
        let broker = "BindReadOnlyPaths=-/run/shunt/broker".to_owned();
        let family = "RestrictAddressFamilies=AF_UNIX".to_owned();
        let none: Vec<String> = Vec::new();
        for (properties, expected) in [
            // Files that may be mapped as code.
            ("NoExecPaths=/", vec![exec.clone()]),
            ("NoExecPaths=/\nExecPaths=/usr/bin/redis-server /usr/lib /lib", none.clone()),
            ("NoExecPaths=/\nExecPaths=-/usr/bin", vec![exec.clone()]),
            ("NoExecPaths=-/usr/lib/shunt\nExecPaths=/usr/lib", vec![exec.clone()]),
            ("NoExecPaths=/var /home\nExecPaths=/usr/bin", none.clone()),
            ("ExecPaths=/usr/bin", none.clone()),
            // Address families.
            ("RestrictAddressFamilies=AF_INET AF_INET6", vec![family.clone()]),
            ("RestrictAddressFamilies=", vec![family.clone()]),
            ("RestrictAddressFamilies=~AF_PACKET AF_UNIX", vec![family.clone()]),
            ("RestrictAddressFamilies=~AF_PACKET", none.clone()),
            ("RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX", none.clone()),
            // Files that are visible.
            ("RootDirectory=/srv/a", vec![library.clone(), broker.clone()]),
            ("RootDirectory=/", none.clone()),
            ("RootImage=/srv/a.raw", vec![library.clone(), broker.clone()]),
            ("TemporaryFileSystem=/usr/lib:ro", vec![library.clone()]),
            ("TemporaryFileSystem=/run", vec![broker.clone()]),
            ("TemporaryFileSystem=/run\nBindPaths=/run/shunt:/run/shunt:rbind", none.clone()),
            ("RootDirectory=/srv/a\nBindReadOnlyPaths=/usr:/usr:rbind", vec![broker.clone()]),
            ("PrivatePIDs=yes", vec![broker]),
            // What hinders nothing.
            ("ProtectSystem=strict\nPrivateTmp=yes\nProtectHome=yes\nPrivateDevices=yes", none.clone()),
            ("MemoryDenyWriteExecute=yes\nNoNewPrivileges=yes\nPrivateUsers=yes", none.clone()),
            ("PrivateNetwork=yes\nRestrictNamespaces=yes\nDynamicUser=yes\nProtectProc=invisible", none),
        ] {
            assert_eq!(additions(properties), expected, "{properties}");
        }
    }

    #[test]
    fn a_filter_gets_the_calls_that_it_lacks() {
        let all_but_one = CALLS[1..].join(" ");
        assert_eq!(
            additions(&format!("SystemCallFilter={all_but_one}")),
            [format!("SystemCallFilter={}", CALLS[0])]
        );
        assert_eq!(additions(&format!("SystemCallFilter={}", CALLS.join(" "))), [""; 0]);
        assert_eq!(
            additions("SystemCallFilter=~mount memfd_create:EPERM mincore kcmp"),
            ["SystemCallFilter=kcmp memfd_create"]
        );
        assert_eq!(additions("SystemCallFilter=~mount"), [""; 0]);
        let mut sorted = CALLS;
        sorted.sort_unstable();
        assert_eq!(sorted, CALLS);
    }

    #[test]
    fn a_library_at_home_is_shown_if_it_can_be() {
        let mut ours = installed();
        ours.library = "/home/a/libshunt.so".into();
        assert_eq!(
            of("ProtectHome=yes", &ours, "").unwrap_err(),
            "the unit hides /home/a/libshunt.so by ProtectHome=yes"
        );
        let bind = "BindReadOnlyPaths=-/home/a/libshunt.so".to_owned();
        assert!(of("ProtectHome=tmpfs", &ours, "").unwrap().contains(&bind));
        assert!(!of("ProtectHome=read-only", &ours, "").unwrap().contains(&bind));
        ours.library = "/tmp/libshunt.so".into();
        let bind = "BindReadOnlyPaths=-/tmp/libshunt.so".to_owned();
        assert!(of("PrivateTmp=yes", &ours, "").unwrap().contains(&bind));
        assert!(!of("PrivateTmp=no", &ours, "").unwrap().contains(&bind));
        assert_eq!(
            of("InaccessiblePaths=-/run", &installed(), "").unwrap_err(),
            "the unit hides /run/shunt/broker by InaccessiblePaths=/run"
        );
    }

    #[test]
    fn the_units_own_environment_stays() {
        let lines = of("Environment=LD_PRELOAD=/a.so SHUNT_BROKER=/b A=c", &installed(), "").unwrap();
        assert_eq!(lines[0], "Environment=\"LD_PRELOAD=/usr/lib/shunt/libshunt.so:/a.so\"");
        assert!(!lines.iter().any(|line| line.contains("SHUNT_BROKER")), "{lines:?}");
        for unset in ["LD_PRELOAD", "SHUNT_BROKER=x"] {
            let refused = of(&format!("UnsetEnvironment=A {unset}"), &installed(), "").unwrap_err();
            assert_eq!(refused, format!("the unit has UnsetEnvironment={unset}"));
        }
        let mut ours = installed();
        ours.rules = Some("*:spin=50%\";\\".into());
        let lines = of("", &ours, "").unwrap();
        assert_eq!(lines.last().unwrap(), r#"Environment="SHUNT_RULES=*:spin=50%%\";\\""#);
    }

    #[test]
    fn the_command_is_named_only_where_it_can_be_executed() {
        for hidden in ["NoExecPaths=/\nExecPaths=/usr/lib", "RootDirectory=/srv", "TemporaryFileSystem=/usr"]
        {
            let lines = of(hidden, &installed(), "").unwrap();
            assert!(!lines.iter().any(|line| line.contains("SHUNT_INTERCEPT")), "{hidden}: {lines:?}");
        }
    }

    /// systemd shows the properties with the drop-in that is there.
    #[test]
    fn enabling_again_changes_nothing() {
        let before = "NoExecPaths=/\nRestrictAddressFamilies=AF_INET\nSystemCallFilter=~kcmp\nTemporaryFileSystem=/run\n";
        let settings = of(before, &installed(), "").unwrap();
        let drop_in = text("a.service", &settings);
        let after = "NoExecPaths=/\nExecPaths=-/usr/lib/shunt/libshunt.so\nRestrictAddressFamilies=AF_INET AF_UNIX\n\
            SystemCallFilter=~\nTemporaryFileSystem=/run\nBindReadOnlyPaths=-/run/shunt/broker:/run/shunt/broker:rbind\n\
            Environment=LD_PRELOAD=/usr/lib/shunt/libshunt.so SHUNT_BROKER=/run/shunt/broker/broker.sock";
        assert_eq!(of(after, &installed(), &drop_in).unwrap(), settings);
        assert!(drop_in.starts_with(
            "# Written by `shunt service enable a`; `shunt service disable a` removes it.\n[Service]\n"
        ));
    }

    #[test]
    fn links_are_followed() {
        let merged = |path: &Path| match path.strip_prefix("/lib") {
            Ok(rest) => Path::new("/usr/lib").join(rest),
            Err(_) => path.to_owned(),
        };
        let unit = Properties::parse("NoExecPaths=/\nExecPaths=/lib");
        let lines = settings(&unit, &installed(), "", &merged).unwrap();
        assert!(!lines.iter().any(|line| line.starts_with("ExecPaths")), "{lines:?}");
    }
}
