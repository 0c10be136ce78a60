//! Builds a service: compiles one C file twice with clang, into one object.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use object::{Object, ObjectSymbol};
use thiserror::Error;

use super::state::{Unshared, check_state};
use crate::service::file::SECTION;

/// The headers for services, embedded so that nothing needs to be installed.
pub(super) const HEADERS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

/// An error that prevents the build of an object.
#[derive(Debug, Error)]
pub enum BuildError {
    /// The source is not called NAME.c.
    #[error("{}: a service is one C file, as in NAME.c", .0.display())]
    NotC(PathBuf),
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file's path.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The compiler cannot be run.
    #[error("{compiler} cannot be run ({error}): install clang, or name another in CLANG")]
    NoCompiler {
        /// The command that was tried.
        compiler: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// The source calls a function of a library, which the object is never linked with.
    #[error(
        "there is no {0} in the kernel; bytes are compared by shunt_is, looked for by shunt_find, and copied by \
         __builtin_memcpy with a constant length"
    )]
    Undefined(String),
    /// The source has variables or maps that the halves would not share.
    #[error(transparent)]
    State(#[from] Unshared),
    /// The compiler's errors, with their lines.
    #[error("the service does not compile {half}:\n{complaint}")]
    Complaint {
        /// The half that failed to compile.
        half: &'static str,
        /// The compiler's output.
        complaint: String,
    },
}

/// Builds NAME.bpf.o next to NAME.c, or at `output`, and returns its path. `defines` has the form
/// of clang's -D.
pub fn build(source: &Path, output: Option<&Path>, defines: &[String]) -> Result<PathBuf, BuildError> {
    if source.extension() != Some(OsStr::new("c")) {
        return Err(BuildError::NotC(source.to_owned()));
    }
    let output = output.map_or_else(|| source.with_extension("bpf.o"), Path::to_owned);
    let file = |path: &Path| {
        let path = path.to_owned();
        move |error| BuildError::File { path, error }
    };
    let _ = std::fs::metadata(source).map_err(file(source))?;
    let scratch = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
    let headers = scratch.path().join("shunt");
    std::fs::create_dir(&headers).map_err(file(&headers))?;
    for (name, text) in HEADERS {
        let path = headers.join(name);
        std::fs::write(&path, text).map_err(file(&path))?;
    }

    let compile = |half, arguments: &[&OsStr]| {
        let mut command = clang();
        command.args(["-O2", "-g", "-Wall", "-Werror=unused-result", "-I"]).arg(scratch.path());
        // Debian has a separate <asm/types.h> for each architecture.
        command.arg(format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH));
        command.args(defines.iter().map(|define| format!("-D{define}")));
        run(command.args(arguments).arg(source), half)
    };
    let native = scratch.path().join("native.so");
    let arguments = ["-shared", "-fPIC", "-nostdlib", "-fno-strict-aliasing", "-o"].map(OsStr::new);
    compile("for user space", &[&arguments[..], &[native.as_os_str()]].concat())?;
    let carrier = scratch.path().join("carrier.h");
    let text = format!(
        "__asm__(\".pushsection {SECTION},\\\"\\\",@progbits\\n.incbin \\\"{}\\\"\\n.popsection\\n\");\n",
        native.display()
    );
    std::fs::write(&carrier, text).map_err(file(&carrier))?;
    let object = scratch.path().join("service.bpf.o");
    let arguments = ["-target", "bpf", "-mcpu=v3", "-c", "-include"].map(OsStr::new);
    compile(
        "for the kernel",
        &[&arguments[..], &[carrier.as_os_str(), OsStr::new("-o"), object.as_os_str()]].concat(),
    )?;
    let built = std::fs::read(&object).map_err(file(&object))?;
    let missing = undefined(&built);
    if !missing.is_empty() {
        return Err(BuildError::Undefined(missing.join(", ")));
    }
    check_state(&built, Some(source))?;
    // Replace an existing file only with a complete one.
    std::fs::copy(&object, &output).map_err(file(&output))?;
    Ok(output)
}

/// Returns the undefined functions of an object. The compiler can insert calls of library functions
/// that the source does not name, such as memcmp.
fn undefined(object: &[u8]) -> Vec<String> {
    let parsed = object::File::parse(object);
    let symbols = parsed.iter().flat_map(|parsed| parsed.symbols());
    let missing = symbols.filter(|symbol| symbol.is_undefined()).filter_map(|symbol| symbol.name().ok());
    missing.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn clang() -> Command {
    Command::new(std::env::var_os("CLANG").unwrap_or_else(|| "clang".into()))
}

fn run(command: &mut Command, half: &'static str) -> Result<(), BuildError> {
    let output = command.output().map_err(|error| BuildError::NoCompiler {
        compiler: command.get_program().to_string_lossy().into_owned(),
        error,
    })?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    Err(BuildError::Complaint { half, complaint })
}
