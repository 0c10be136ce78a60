//! Builds the Debian packages, installs them in a private view of this system, uses them as
//! README.md describes, and removes them without remains. Measures what is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn packages_are_installed_used_and_removed_without_a_trace() {
    let directory = tempfile::tempdir().unwrap();
    let deb = directory.path().join("deb");
    // Nothing is fetched: there is no network.
    let mut make = Command::new("unshare");
    make.args(["--net", "make", "deb"]);
    let made = make.arg(format!("DEB={}", deb.display())).current_dir(root()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let packages: Vec<PathBuf> = std::fs::read_dir(&deb)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    assert_eq!(packages.len(), 4, "{packages:?}");
    // The quick start is that of README.md.
    for script in ["run", "quick-start", "upgrade", "repo", "services --only redis-server,memcached,hardened"]
    {
        let mut words = script.split(' ');
        let script = root().join("tests/package").join(words.next().unwrap());
        let tried = Command::new(&script).args(words).args(&packages).output().unwrap();
        let said = [tried.stdout, tried.stderr].concat();
        assert!(tried.status.success(), "{}: {}", script.display(), String::from_utf8_lossy(&said));
    }
}

#[test]
fn packages_are_not_built_without_clang() {
    let mut make = Command::new("make");
    let made = make.arg("deb").env("CLANG", "/nonexistent/clang").current_dir(root()).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(!made.status.success() && said.contains("install clang first"), "{said}");
}

/// The largest size of `shunt` and libshunt.so together, in bytes, as they are installed. The target
/// is 10 MB (SPECIFICATION.md).
const LARGEST: u64 = 23_000_000;

#[test]
fn the_program_and_its_library_are_small() {
    let directory = tempfile::tempdir().unwrap();
    let mut make = Command::new("make");
    make.args(["install", "BUILT=yes", "PREFIX=/usr"]).current_dir(root());
    let made = make.arg(format!("DESTDIR={}", directory.path().display())).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let size = |name: &str| std::fs::metadata(directory.path().join(name)).unwrap().len();
    let [program, library] = ["usr/bin/shunt", "usr/lib/shunt/libshunt.so"].map(size);
    println!("shunt {program}, libshunt.so {library} bytes");
    assert!(program + library < LARGEST, "shunt has {program} bytes, libshunt.so {library}");
    // The comparisons are not part of the main package.
    assert!(size("usr/lib/shunt/shunt-bench") > 0);
}
