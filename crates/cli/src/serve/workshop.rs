//! Creates, builds and checks services: `shunt serve new`, `build` and `check`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use shunt_serve::service::Service;
use shunt_serve::service::file::Program;
use shunt_serve::service::trial::Trial;
use shunt_serve::workshop::vectors::{self, Vector};

pub(super) fn new(name: &str, directory: &Path) -> Result<()> {
    let files = shunt_serve::workshop::new(name, directory)?;
    let [source, tests] = files.each_ref().map(|file| file.strip_prefix(".").unwrap_or(file));
    println!("{} is a service to begin with, {} are its tests", source.display(), tests.display());
    println!("next: shunt serve build {}", source.display());
    Ok(())
}

pub(super) fn build(source: &Path, output: Option<&Path>, defines: &[String]) -> Result<()> {
    let object = shunt_serve::workshop::build(source, output, defines)?;
    println!("{} has been built", object.display());
    println!("next: shunt serve check {}", object.display());
    Ok(())
}

pub(super) fn check(service: &str, tests: Option<&Path>, in_kernel: bool) -> Result<()> {
    let program = Program::open(service)?;
    let state = shunt_serve::workshop::state(&program.object, None);
    if !state.is_empty() {
        let names: Vec<String> = state.iter().map(ToString::to_string).collect();
        bail!(
            "the service keeps state in {}: the kernel and user space would each have their own; build it again with \
             `shunt serve build`, which names the lines",
            names.join(", ")
        );
    }
    println!("{}: loaded in user space", program.native.name());
    let mut trial = match in_kernel {
        true => Some(Trial::load(&program.object)?),
        false => None,
    };
    if trial.is_some() {
        println!("{}: the kernel has verified it", program.native.name());
    }
    let Some(file) = tests.map(Path::to_owned).or_else(|| beside(service)) else {
        println!("no tests");
        return Ok(());
    };
    let vectors = read(&file)?;
    let mut failures = 0;
    for vector in &vectors {
        let kernel = match &mut trial {
            Some(trial) => vector.in_kernel(trial)?,
            None => None,
        };
        for failure in vector.in_user_space(&program.native).into_iter().chain(kernel) {
            println!("{}: {failure}", file.display());
            failures += 1;
        }
    }
    if failures > 0 {
        bail!("{failures} of the tests failed");
    }
    let halves = if trial.is_some() { "in user space and in the kernel" } else { "in user space only" };
    println!("{} tests passed, {halves}", vectors.len());
    Ok(())
}

/// Returns the path of NAME.tests, next to NAME.bpf.o, if that file exists.
fn beside(service: &str) -> Option<PathBuf> {
    let tests = PathBuf::from(format!("{}.tests", service.strip_suffix(".bpf.o")?));
    tests.exists().then_some(tests)
}

fn read(file: &Path) -> Result<Vec<Vector>> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    vectors::read(&text).map_err(|error| anyhow!("{}: {error}", file.display()))
}
