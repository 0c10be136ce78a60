//! Replaces the content of a file atomically.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use tempfile::NamedTempFile;

/// Writes `content` to a new file next to `path`, and renames it over the old one.
///
/// Permissions are kept, and so is the owner if this process may change it. If `path` is a symbolic
/// link, the link stays and its target is replaced.
pub(crate) fn replace(path: &Path, content: &str) -> io::Result<()> {
    let path = fs::canonicalize(path)?;
    let old = fs::metadata(&path)?;
    let mut new = NamedTempFile::new_in(path.parent().unwrap_or(Path::new("/")))?;
    new.write_all(content.as_bytes())?;
    new.as_file().set_permissions(old.permissions())?;
    keep_owner(new.as_file(), &old)?;
    new.as_file().sync_all()?;
    new.persist(&path)?;
    Ok(())
}

fn keep_owner(file: &File, old: &fs::Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};
    let new = file.metadata()?;
    if (new.uid(), new.gid()) == (old.uid(), old.gid()) {
        return Ok(());
    }
    fchown(file, Some(old.uid()), Some(old.gid()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn a_link_and_permissions_stay_and_nothing_lies_beside() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("file", &link).unwrap();
        replace(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_left() {
        assert!(replace(Path::new("/proc/self/status"), "x").is_err());
        assert!(replace(Path::new("/no/such/file"), "x").is_err());
    }
}
