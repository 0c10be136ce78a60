//! Creates, builds and checks services: `shunt serve new`, `build` and `check`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use shunt_serve::service::Service;
use shunt_serve::service::file::Program;
use shunt_serve::service::store::{Session, Store};
use shunt_serve::service::trial::Trial;
use shunt_serve::workshop::Template;
use shunt_serve::workshop::vectors::{self, Vector};

/// Returns the template that the flags ask for.
pub(super) fn template(stateful: bool, contents: bool) -> Template {
    match (stateful, contents) {
        (_, true) => Template::Contents,
        (true, false) => Template::Stateful,
        (false, false) => Template::Stateless,
    }
}

pub(super) fn new(name: &str, directory: &Path, template: Template) -> Result<()> {
    let files = shunt_serve::workshop::new(name, directory, template)?;
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
    let Program { native, object, .. } = Program::open(service)?;
    let source = service.strip_suffix(".bpf.o").map(|name| PathBuf::from(format!("{name}.c")));
    shunt_serve::workshop::check_state(&object, source.as_deref())?;
    let [in_user, in_trial] = [false, in_kernel].map(|in_kernel| Store::new(native.state(), in_kernel));
    let (in_user, in_trial) = (in_user?, in_trial?);
    let native = native.with_store(in_user.clone());
    println!("{}: loaded in user space", native.name());
    let mut trial = match in_kernel {
        true => Some(Trial::load(&object)?.with_store(&in_trial)?),
        false => None,
    };
    if trial.is_some() {
        println!("{}: the kernel has verified it", native.name());
    }
    let Some(file) = tests.map(Path::to_owned).or_else(|| beside(service)) else {
        println!("no tests");
        return Ok(());
    };
    let vectors = read(&file)?;
    let mut failures = 0;
    let mut sessions = [Session::default(), Session::default()];
    for vector in &vectors {
        let [user, kernel] = &mut sessions;
        let in_kernel = match &mut trial {
            Some(trial) => vector.in_kernel(trial, kernel)?,
            None => None,
        };
        for failure in vector.in_user_space(&native, user).into_iter().chain(in_kernel) {
            println!("{}: {failure}", file.display());
            failures += 1;
        }
        if trial.is_some() && sessions[0] != sessions[1] {
            bail!(
                "{}: line {}: the halves have left different states of the connection",
                file.display(),
                vector.line
            );
        }
    }
    let differences = match trial {
        Some(_) => vectors::differences(&object, &in_user, &in_trial),
        None => Vec::new(),
    };
    if !differences.is_empty() {
        bail!("the halves have left different states of the service, in {}", differences.join(", "));
    }
    if failures > 0 {
        bail!("{failures} of the tests failed");
    }
    let halves = if trial.is_some() { "in user space and in the kernel" } else { "in user space only" };
    println!("{} tests passed, {halves}", vectors.iter().filter(|vector| vector.is_test()).count());
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
