//! `shunt bugreport`: writes one file of text with what others need to look into a problem.
//!
//! It has no data of connections, no arguments of programs, and of the environment only the values
//! of shunt's own variables. Keys are in files, which are not read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use shunt_abi::shown::visible;
use shunt_sys::proc::pids;

use crate::args::BugreportArgs;
use crate::explain::is_under_shunt;
use crate::{broker, library};

/// How many lines of a log are in the report.
const LINES: usize = 300;

pub(crate) fn run(args: &BugreportArgs) -> Result<()> {
    let mut text = collect();
    if args.no_addresses {
        text = without_addresses(&text);
    }
    let path = args.output.clone().unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        PathBuf::from(format!("shunt-bugreport-{}.txt", now.map_or(0, |since| since.as_secs())))
    });
    let mut file = OpenOptions::new();
    let mut file = file
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("cannot make {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    println!(
        "{}: read it before you send it: it has names of programs{}",
        path.display(),
        match args.no_addresses {
            true => "",
            false => ", and addresses (--no-addresses leaves them out)",
        }
    );
    Ok(())
}

fn collect() -> String {
    let mut text = String::new();
    let mut add = |title: &str, content: String| {
        let _ = write!(text, "== {title} ==\n{}\n\n", content.trim_end());
    };
    add("version", version());
    add("machine", machine());
    for arguments in [
        &["doctor"][..],
        &["status", "--json"],
        &["config", "show"],
        &["runtime", "status"],
        &["overlay", "status", "--json"],
        &["relay", "status", "--json"],
    ] {
        add(&format!("shunt {}", arguments.join(" ")), of_command(broker::myself().args(arguments)));
    }
    add("programs under shunt", programs());
    add("variables of this shell", variables(&fs::read("/proc/self/environ").unwrap_or_default()));
    add("/etc/ld.so.preload", fs::read_to_string("/etc/ld.so.preload").unwrap_or_default());
    if Path::new("/run/systemd/system").exists() {
        add(
            "shunt service status --json",
            of_command(broker::myself().args(["service", "status", "--json"])),
        );
        let mut units = Command::new("systemctl");
        units.args(["list-units", "--all", "--plain", "--no-legend", "--no-pager", "shunt*"]);
        add("units", of_command(&mut units));
        let mut journal = Command::new("journalctl");
        journal.args(["--no-pager", "--quiet", "--unit", "shunt*", "--lines", &LINES.to_string()]);
        add("log of the units", of_command(&mut journal));
    }
    for path in logs() {
        add(&format!("log {}", path.display()), last_lines(&fs::read_to_string(&path).unwrap_or_default()));
    }
    text
}

fn version() -> String {
    let library = library::find();
    let found = library.map_or_else(|error| format!("{error:#}"), |path| path.display().to_string());
    let own =
        std::env::current_exe().map_or_else(|error| error.to_string(), |path| path.display().to_string());
    let commit = format!("protocol of libshunt.so and broker: {}", shunt_abi::VERSION);
    format!("shunt {}\n{commit}\ncommand: {own}\nlibrary: {found}", env!("CARGO_PKG_VERSION"))
}

fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let first = |path: &str, name: &str| {
        let text = read(path);
        text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned()
    };
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    [
        read("/proc/version"),
        first("/etc/os-release", "PRETTY_NAME"),
        first("/proc/cpuinfo", "model name"),
        format!("processors: {processors}"),
        first("/proc/meminfo", "MemTotal"),
        format!("load: {}", read("/proc/loadavg")),
        format!("security modules: {}", read("/sys/kernel/security/lsm")),
        format!("yama.ptrace_scope: {}", read("/proc/sys/kernel/yama/ptrace_scope")),
        format!("unprivileged_bpf_disabled: {}", read("/proc/sys/kernel/unprivileged_bpf_disabled")),
        first("/proc/self/status", "CapEff"),
        format!("user: {}", rustix::process::geteuid().as_raw()),
    ]
    .join("\n")
}

/// Returns what a command prints, and how it ends if it fails.
fn of_command(command: &mut Command) -> String {
    match command.stdin(Stdio::null()).output() {
        Err(error) => error.to_string(),
        Ok(output) => {
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            text += &String::from_utf8_lossy(&output.stderr);
            if !output.status.success() {
                let _ = write!(text, "({})", output.status);
            }
            text
        }
    }
}

/// Lists the processes that have loaded libshunt.so, with shunt's variables.
fn programs() -> String {
    let mut text = String::new();
    for pid in pids().filter(|pid| is_under_shunt(*pid)) {
        let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let name = String::from_utf8_lossy(&read("comm")).trim().to_owned();
        let variables = variables(&read("environ")).trim_end().replace('\n', " ");
        let _ = writeln!(text, "{} (pid {pid}): {}", visible(&name), visible(&variables));
    }
    text
}

/// Returns shunt's variables of an environment, and LD_PRELOAD.
fn variables(environment: &[u8]) -> String {
    let all = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let own = all.filter(|pair| pair.starts_with("SHUNT_") || pair.starts_with("LD_PRELOAD="));
    own.map(|pair| format!("{pair}\n")).collect()
}

/// Returns the files to which brokers write their logs.
fn logs() -> Vec<PathBuf> {
    let named = std::env::var_os(crate::args::LOG_FILE).map(PathBuf::from);
    let mut all: Vec<PathBuf> =
        [true, false].into_iter().filter_map(crate::config::log_file).chain(named).collect();
    all.sort();
    all.dedup();
    all
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Replaces addresses, each by the same name everywhere. Those of this host only stay.
fn without_addresses(text: &str) -> String {
    let mut names: BTreeMap<IpAddr, String> = BTreeMap::new();
    let mut result = String::new();
    let is_part = |letter: char| letter.is_ascii_hexdigit() || letter == ':' || letter == '.';
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|letter| !is_part(letter)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        result.push_str(&redacted(word, &mut names));
        let next = after.find(is_part).unwrap_or(after.len());
        result.push_str(&after[..next]);
        rest = &after[next..];
    }
    result
}

fn redacted(word: &str, names: &mut BTreeMap<IpAddr, String>) -> String {
    let known = |text: &str| text.parse::<IpAddr>().ok();
    // What follows an address is a port, or the end of a sentence.
    let ends = std::iter::once(word.len()).chain(word.rmatch_indices([':', '.']).map(|(at, _)| at));
    for end in ends.take(3) {
        let Some(address) = known(&word[..end]) else { continue };
        if address.is_loopback() || address.is_unspecified() {
            return word.to_owned();
        }
        let number = names.len() + 1;
        let name = names.entry(address).or_insert_with(|| format!("address-{number}"));
        return format!("{name}{}", &word[end..]);
    }
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_variables_are_reported() {
        let environment =
            b"PATH=/bin\0PASSWORD=secret\0SHUNT_SPIN=off\0LD_PRELOAD=/l.so\0MY_SHUNT_KEY=secret\0";
        assert_eq!(variables(environment), "SHUNT_SPIN=off\nLD_PRELOAD=/l.so\n");
    }

    #[test]
    fn an_address_has_one_name_everywhere() {
        let text =
            "10.1.2.3:80 to [2001:db8::7]:443, 10.1.2.3, 127.0.0.1:80 and ::1 of version 1.2.3.\n10.9.9.9.";
        assert_eq!(
            without_addresses(text),
            "address-1:80 to [address-2]:443, address-1, 127.0.0.1:80 and ::1 of version 1.2.3.\naddress-3."
        );
    }

    #[test]
    fn a_log_is_shown_from_its_end() {
        let text: String = (0..500).map(|line| format!("{line}\n")).collect();
        let last = last_lines(&text);
        assert_eq!((last.lines().count(), last.lines().last()), (LINES, Some("499")));
        assert_eq!(last_lines("a"), "a");
    }
}
