//! Runs programs that refuse to run as root as another user.

use std::os::unix::fs::chown;
use std::path::Path;

use anyhow::{Context, Result};

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns this process's user name, for programs that need one in their configuration.
pub(crate) fn own_name() -> String {
    let id = rustix::process::geteuid().as_raw().to_string();
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let own = passwd.lines().find(|line| line.split(':').nth(2) == Some(&id));
    own.and_then(|line| line.split(':').next()).unwrap_or("nobody").to_owned()
}

/// Changes the owner of a directory or file, if this process is root.
pub(crate) fn give(path: &Path, user: &str) -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let passwd = std::fs::read_to_string("/etc/passwd")?;
    let entry = passwd.lines().find_map(|line| line.strip_prefix(user)?.strip_prefix(':'));
    let uid = entry.and_then(|entry| entry.split(':').nth(1)?.parse().ok());
    chown(path, Some(uid.with_context(|| format!("there is no user {user}"))?), None)?;
    Ok(())
}

/// Returns arguments of setpriv that run `program`, as the user if this process is root.
pub(crate) fn becomes(user: &str, program: &Path) -> Vec<String> {
    let mut arguments = Vec::new();
    if is_root() {
        arguments.extend(["--reuid", user, "--regid", user, "--init-groups"].map(str::to_owned));
    }
    arguments.extend(["--".to_owned(), program.display().to_string()]);
    arguments
}
