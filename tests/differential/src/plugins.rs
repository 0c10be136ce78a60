//! The libraries that actors load to call the kernel past the shim, compiled once per run.

use anyhow::{Result, ensure};
use shunt_differential::actor::{FUNCTIONS, INLINE};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const SOURCES: [(&str, &str); 2] =
    [(INLINE, include_str!("../plugins/inline.c")), (FUNCTIONS, include_str!("../plugins/functions.c"))];

/// Returns the directory of the libraries. It is next to this program, so that another run finds
/// them there.
pub(crate) fn directory() -> Result<&'static Path> {
    static DIRECTORY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = DIRECTORY.get_or_init(|| compile().map_err(|error| format!("{error:#}")));
    made.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

fn compile() -> Result<PathBuf> {
    let directory = std::env::current_exe()?.with_file_name("differential-plugins");
    std::fs::create_dir_all(&directory)?;
    for (name, source) in SOURCES {
        // Two runs may compile at the same time, so each makes a file of its own name and renames
        // it.
        let own = format!("{name}.{}", std::process::id());
        let (half, text) = (directory.join(&own), directory.join(own + ".c"));
        std::fs::write(&text, source)?;
        let compiled =
            Command::new("gcc").args(["-O1", "-shared", "-fPIC", "-o"]).args([&half, &text]).status();
        std::fs::remove_file(&text)?;
        match compiled {
            // As in the virtual machines of tests/libc: actors use mapped code instead.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                eprintln!("gcc is not installed: no actor loads {name}");
                continue;
            }
            compiled => ensure!(compiled?.success(), "gcc cannot compile {name}"),
        }
        std::fs::rename(&half, directory.join(name))?;
    }
    Ok(directory)
}
