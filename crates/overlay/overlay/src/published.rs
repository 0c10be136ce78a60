//! The policy for connections between containers of this host, written to a file for the broker
//! (docs/adr/0034-one-host-has-the-overlays-policy.md).

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::policy::InEffect;

/// Publishes a policy before it takes effect. If that fails, the file is emptied. The broker then
/// cannot parse it, and keeps connections between containers on TCP.
pub(crate) fn publish(config: &Config, policy: &InEffect) {
    let path = place(&config.control);
    let local =
        serde_json::to_vec(&policy.on_one_host(&config.prefixes)).expect("the keys of its maps are strings");
    if let Err(error) = replace(&path, &local) {
        let path = path.display();
        tracing::error!(%error, "{path} cannot be written: connections of containers of this host stay on TCP");
        let _ = std::fs::write(place(&config.control), "");
    }
}

/// Returns a path in the directory of the control socket, which no container can see.
fn place(control: &Path) -> PathBuf {
    control.with_extension("policy")
}

/// Replaces a file atomically.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension("policy-new");
    let _ = std::fs::remove_file(&new);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(content)?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_policy_is_beside_the_control_socket_and_roots_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = place(&directory.path().join("overlay.sock"));
        assert_eq!(path.file_name().unwrap(), "overlay.policy");
        for text in ["one", "the other"] {
            replace(&path, text.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(replace(Path::new("/no/such/overlay.policy"), b"x").is_err());
    }
}
