//! Builds container images from programs of this machine and their libraries, without a registry or
//! a network.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::host::Host;
use crate::programs::find;

/// Copies these programs into a tree, with a shell and the libraries that the shim needs.
pub(crate) fn fill(host: &Host, tree: &Path, programs: &[&str]) {
    for program in ["sh", "cat", "sleep"].iter().chain(programs) {
        copy_with_libraries(&find(program), tree);
    }
    let library = &host.tools().expect("a host under shunt").library;
    // The shim itself is mounted later; only its libraries are copied.
    libraries(library).iter().for_each(|path| copy(path, tree));
    for (directory, mode) in [("tmp", 0o1777), ("etc", 0o755)] {
        let path = tree.join(directory);
        fs::create_dir_all(&path).expect("own directory");
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("own directory");
    }
    fs::write(tree.join("etc/passwd"), "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n")
        .expect("own directory");
}

fn copy_with_libraries(program: &Path, tree: &Path) {
    copy(program, tree);
    libraries(program).iter().for_each(|path| copy(path, tree));
}

/// Returns the libraries and the dynamic linker that `ldd` lists.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().expect("ldd (libc-bin) runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

/// Copies a file to the same path in the tree, resolving symbolic links.
fn copy(file: &Path, tree: &Path) {
    let to = tree.join(file.strip_prefix("/").expect("an absolute path"));
    fs::create_dir_all(to.parent().expect("it has a directory")).expect("own directory");
    fs::copy(file, &to).unwrap_or_else(|error| panic!("copying {}: {error}", file.display()));
}
