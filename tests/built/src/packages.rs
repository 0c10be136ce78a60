//! Packages that Debian does not have, or only older versions of. Each is fetched once.

use std::path::PathBuf;
use std::process::Command;

use crate::kept;

/// Returns the directory of a package of PyPI.
///
/// # Panics
///
/// Panics if it cannot be fetched.
pub fn python_package(name: &str) -> PathBuf {
    kept("python", name, |half| {
        let fetched = Command::new("/usr/bin/python3")
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
            .args([half.as_os_str(), name.as_ref()])
            .status();
        assert!(fetched.expect("pip runs").success(), "fetching {name} failed");
    })
}

/// Returns the directory of a package of npm, which is in its `node_modules`.
///
/// # Panics
///
/// Panics if it cannot be fetched.
pub fn node_package(name: &str, version: &str) -> PathBuf {
    let place = kept("node", &format!("{}-{version}", name.replace('/', "-")), |half| {
        std::fs::create_dir_all(half).expect("a directory next to cargo's");
        let fetched = Command::new("npm")
            .args(["install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--no-save"])
            .arg("--prefix")
            .arg(half)
            .arg(format!("{name}@{version}"))
            .status();
        assert!(fetched.expect("npm runs").success(), "fetching {name} failed");
    });
    place.join("node_modules").join(name)
}
