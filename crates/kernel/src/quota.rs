//! A control group whose processes get half a processor between them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::cgroup::{Cgroup, MOUNTED, path_of};

/// Microseconds of processor time in each period.
const QUOTA: u32 = 50_000;
const PERIOD: u32 = 100_000;
/// Where version 1 has the controller.
const VERSION_1: &str = "/sys/fs/cgroup/cpu";
/// Which controllers the groups below one have.
const ENABLED: &str = "cgroup.subtree_control";
const CONTROLLER: &str = "cpu";

/// See the module. The group is gone when this is dropped, if no process is in it any more.
#[derive(Debug)]
pub struct Quota(Cgroup);

impl Quota {
    /// By version 2, or else where version 1 has the controller. Nothing is changed in groups that are there already.
    pub fn make() -> io::Result<Quota> {
        if let Ok(own) = path_of("self") {
            let own = Path::new(MOUNTED).join(own);
            // A group with processes has none below it that have a controller: so this may be one far above.
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

    /// The file by which a process enters the group: it writes its number, or 0 for itself.
    pub fn entrance(&self) -> PathBuf {
        self.0.entrance()
    }
}

/// As in `4:cpu,cpuacct:/a/group`.
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

    /// Where this process may make one at all.
    #[test]
    fn a_group_is_gone_with_its_value() {
        let Ok(quota) = Quota::make() else { return };
        let entrance = quota.entrance();
        assert!(entrance.exists());
        drop(quota);
        assert!(!entrance.exists());
    }
}
