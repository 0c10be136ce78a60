//! A control group whose processes share half a processor.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::cgroup::{Cgroup, MOUNTED, path_of};

/// Processor time in each period, and below, the period, in microseconds.
const QUOTA: u32 = 50_000;
const PERIOD: u32 = 100_000;
/// The version 1 hierarchy of the cpu controller.
const VERSION_1: &str = "/sys/fs/cgroup/cpu";
/// The file that lists the controllers of a group's children.
const ENABLED: &str = "cgroup.subtree_control";
const CONTROLLER: &str = "cpu";

/// A control group with a quota. It is removed on drop if no process is in it.
#[derive(Debug)]
pub struct Quota(Cgroup);

impl Quota {
    /// Creates the group in version 2, or else in version 1. Existing groups are not changed.
    pub fn make() -> io::Result<Quota> {
        if let Ok(own) = path_of("self") {
            let own = Path::new(MOUNTED).join(own);
            // In version 2 a group with processes has no children with controllers, so a suitable
            // ancestor may be far above.
            let mut above = own.ancestors().take_while(|group| group.starts_with(MOUNTED));
            if let Some(above) = above.find(|group| is_enabled(group)) {
                return Quota::below(above, &[("cpu.max", format!("{QUOTA} {PERIOD}"))]);
            }
        }
        let groups = fs::read_to_string("/proc/self/cgroup")?;
        let own = groups.lines().find_map(of_version_1);
        let version_1 = own.map(|own| Path::new(VERSION_1).join(own.trim_start_matches('/')));
        let Some(own) = version_1.filter(|own| own.is_dir()) else {
            let missing = format!("no {ENABLED} at or above the own control group has {CONTROLLER}");
            return Err(io::Error::new(io::ErrorKind::NotFound, missing));
        };
        let files = [("cpu.cfs_period_us", PERIOD.to_string()), ("cpu.cfs_quota_us", QUOTA.to_string())];
        Quota::below(&own, &files)
    }

    fn below(above: &Path, files: &[(&str, String)]) -> io::Result<Quota> {
        let group = Cgroup::below(above)?;
        for (name, text) in files {
            fs::write(group.file(name), text)?;
        }
        Ok(Quota(group))
    }

    /// Returns the file that moves a process into the group: it writes its PID, or 0 for itself.
    pub fn entrance(&self) -> PathBuf {
        self.0.entrance()
    }
}

/// Returns the path in a line such as `4:cpu,cpuacct:/a/group` if it is the cpu controller's.
fn of_version_1(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    controllers.split(',').any(|one| one == CONTROLLER).then_some(path)
}

fn is_enabled(group: &Path) -> bool {
    let enabled = fs::read_to_string(group.join(ENABLED)).unwrap_or_default();
    enabled.split_whitespace().any(|one| one == CONTROLLER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_is_found_among_those_of_its_hierarchy() {
        assert_eq!(of_version_1("4:cpu,cpuacct:/a/group"), Some("/a/group"));
        assert_eq!(of_version_1("2:cpuacct:/"), None);
        assert_eq!(of_version_1("3:cpuset:/"), None);
        assert_eq!(of_version_1("0::/a/group"), None);
    }

    /// Does nothing if this process may not create groups.
    #[test]
    fn a_group_is_gone_with_its_value() {
        let Ok(quota) = Quota::make() else { return };
        let entrance = quota.entrance();
        assert!(entrance.exists());
        drop(quota);
        assert!(!entrance.exists());
    }
}
