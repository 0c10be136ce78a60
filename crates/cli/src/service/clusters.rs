//! Debian's PostgreSQL. `pg_ctlcluster` clears the environment and reads a cluster's own from
//! `/etc/postgresql/VERSION/CLUSTER/environment`. So the variables are also needed there.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::unit::{self, Properties};

/// Where the clusters are configured.
pub(super) const DIRECTORY: &str = "/etc/postgresql";
const PROGRAM: &str = "pg_ctlcluster";
const FIRST: &str = "# Written by `shunt service enable`, which replaces these lines:";
const LAST: &str = "# End of what shunt has written.";

/// Returns the environment files of the clusters that a unit starts. Most units start none.
pub(super) fn files(unit: &Properties, name: &str, directory: &Path) -> Vec<PathBuf> {
    let is_starter = |path: &PathBuf| path.file_name().is_some_and(|name| name == PROGRAM);
    if !unit.programs().iter().any(is_starter) {
        return Vec::new();
    }
    match unit::instance(name) {
        Some((_, "")) => all(directory),
        Some((_, instance)) => {
            let (version, cluster) = instance.split_once('-').unwrap_or((instance, ""));
            vec![directory.join(version).join(cluster).join("environment")]
        }
        None => Vec::new(),
    }
}

fn all(directory: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    let clusters = below(directory.to_owned()).flat_map(below);
    let mut files: Vec<PathBuf> = clusters
        .filter(|path| path.join("postgresql.conf").exists())
        .map(|path| path.join("environment"))
        .collect();
    files.sort();
    files
}

/// Writes `variables` into a cluster's environment in the place of those that shunt has written.
/// Without any, these are removed. Returns whether the file has changed.
pub(super) fn write(path: &Path, variables: &[(String, String)]) -> Result<bool> {
    let Some((mut file, before)) = open(path)? else {
        if variables.is_empty() {
            return Ok(false);
        }
        bail!("{} does not exist", path.display());
    };
    let after = changed(&before, variables).with_context(|| path.display().to_string())?;
    if after == before {
        return Ok(false);
    }
    // In place, since the file is its cluster's, and others have no right to its directory.
    let write = || {
        use std::io::Seek;
        file.rewind()?;
        file.set_len(0)?;
        file.write_all(after.as_bytes())
    };
    let mut write = write;
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(true)
}

/// Opens a file of another user. A link is refused.
fn open(path: &Path) -> Result<Option<(File, String)>> {
    let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let mut file = match OpenOptions::new().read(true).write(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot open {}", path.display())),
    };
    let data = file.metadata()?;
    if !data.is_file() || data.nlink() != 1 {
        bail!("{} is no ordinary file", path.display());
    }
    let mut text = String::new();
    file.read_to_string(&mut text).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some((file, text)))
}

fn changed(before: &str, variables: &[(String, String)]) -> Result<String> {
    let mut text = String::new();
    let mut is_ours = false;
    for line in before.lines() {
        match line {
            FIRST => is_ours = true,
            LAST => is_ours = false,
            _ if is_ours => {}
            _ => {
                let name = line.split('=').next().unwrap_or_default().trim();
                if variables.iter().any(|(own, _)| own == name) {
                    bail!("it sets {name} already");
                }
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    if !variables.is_empty() {
        text.push_str(FIRST);
        text.push('\n');
        for (name, value) in variables {
            text.push_str(&format!("{name} = '{}'\n", value.replace('\'', "''")));
        }
        text.push_str(LAST);
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Vec<(String, String)> {
        vec![("LD_PRELOAD".into(), "/l.so".into()), ("SHUNT_BROKER".into(), "/b".into())]
    }

    #[test]
    fn a_clusters_environment_is_as_before_afterwards() {
        let before = "# comment\nA = 'b'\n";
        let enabled = changed(before, &variables()).unwrap();
        assert_eq!(enabled, format!("{before}{FIRST}\nLD_PRELOAD = '/l.so'\nSHUNT_BROKER = '/b'\n{LAST}\n"));
        assert_eq!(changed(&enabled, &variables()).unwrap(), enabled);
        assert_eq!(changed(&enabled, &[]).unwrap(), before);
        let refused = changed("LD_PRELOAD = /x\n", &variables()).unwrap_err();
        assert_eq!(refused.to_string(), "it sets LD_PRELOAD already");
    }

    #[test]
    fn a_template_stands_for_every_cluster() {
        let directory = tempfile::tempdir().unwrap();
        for cluster in ["13/old", "15/main"] {
            let path = directory.path().join(cluster);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("postgresql.conf"), "").unwrap();
        }
        let unit = Properties::parse("ExecStart={ path=/usr/bin/pg_ctlcluster ; argv[]=x }");
        let of = |name| files(&unit, name, directory.path());
        let [old, main] =
            ["13/old", "15/main"].map(|cluster| directory.path().join(cluster).join("environment"));
        assert_eq!(of("postgresql@.service"), [old, main.clone()]);
        assert_eq!(of("postgresql@15-main.service"), [main]);
        assert!(files(&Properties::default(), "postgresql@.service", directory.path()).is_empty());
    }

    #[test]
    fn a_link_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("target"), directory.path().join("environment"));
        assert!(!write(&link, &[]).unwrap(), "nothing is there");
        fs::write(&target, "secret\n").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert!(write(&link, &variables()).is_err());
        fs::remove_file(&link).unwrap();
        fs::hard_link(&target, &link).unwrap();
        assert!(write(&link, &variables()).is_err());
        assert_eq!(fs::read_to_string(&target).unwrap(), "secret\n");
        fs::remove_file(&link).unwrap();
        fs::write(&link, "").unwrap();
        assert!(write(&link, &variables()).unwrap() && !write(&link, &variables()).unwrap());
        assert!(write(&link, &[]).unwrap());
        assert_eq!(fs::read_to_string(&link).unwrap(), "");
    }
}
