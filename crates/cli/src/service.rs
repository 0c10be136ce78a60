//! `shunt service`: puts services of systemd under shunt by drop-ins, and takes them out again.
//!
//! A service runs under shunt from its next start on. Nothing is restarted without `--restart`.

mod clusters;
mod drop_in;
mod report;
mod unit;

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;

use crate::args::{Service, ServiceDisable, ServiceEnable, ServicePlace};
use crate::config::OfPrograms;
use crate::obstacle::{self, Obstacle, RunsAs};
use crate::{broker, intercept, library};
use drop_in::Installed;
use unit::Properties;

/// The name of the drop-in.
const FILE: &str = "50-shunt.conf";

pub(crate) fn run(command: &Service) -> Result<()> {
    match command {
        Service::Enable(args) => enable(args),
        Service::Disable(args) => disable(args),
        Service::Status { name, json, place } => report::run(name.as_deref(), *json, place),
    }
}

/// The result for one unit.
#[derive(Debug, Serialize)]
struct Done {
    unit: String,
    drop_in: PathBuf,
    /// Files other than the drop-in that have shunt's variables.
    also: Vec<PathBuf>,
    /// Whether a file was written or removed.
    changed: bool,
    /// The settings of the drop-in.
    settings: Vec<String>,
    notes: Vec<String>,
    /// The units that have to be started again.
    restart: Vec<String>,
    restarted: bool,
}

/// A unit, as the user has named it.
struct Named {
    /// The name of the drop-in's directory, without `.d`.
    name: String,
    /// The properties of the unit, or of each loaded instance of a template.
    units: Vec<Properties>,
}

impl Named {
    fn look(name: &str) -> Result<Named> {
        let name = unit::full_name(name);
        ensure!(name.ends_with(".service"), "{name} is not a service");
        let instances = match unit::instance(&name) {
            Some((template, "")) => unit::instances(&template)?,
            _ => Vec::new(),
        };
        if instances.is_empty() {
            let properties = unit::show(&name)?;
            let is_template = unit::instance(&name).is_some_and(|(_, instance)| instance.is_empty());
            let id = if is_template { name } else { properties.id().to_owned() };
            return Ok(Named { name: id, units: vec![properties] });
        }
        let units = instances.iter().map(|name| unit::show(name)).collect::<Result<_>>()?;
        Ok(Named { name, units })
    }

    /// Returns the template of the instances that this unit only groups, as postgresql.service does.
    fn grouped(&self) -> Option<String> {
        let [one] = &self.units[..] else { return None };
        let starts_nothing = |path: &PathBuf| path.file_name().is_some_and(|name| name == "true");
        if one.get("Type") != Some("oneshot") || !one.programs().iter().all(starts_nothing) {
            return None;
        }
        let parts = one.list("ConsistsOf");
        let mut templates: Vec<String> =
            parts.iter().filter_map(|part| Some(unit::instance(part)?.0)).collect();
        templates.dedup();
        if templates.len() == 1 { templates.pop() } else { None }
    }

    fn active(&self) -> impl Iterator<Item = &str> {
        let units = self.units.iter();
        units
            .filter(|unit| matches!(unit.get("ActiveState"), Some("active" | "activating" | "reloading")))
            .map(Properties::id)
    }
}

/// Returns the path of a unit's drop-in.
fn path(place: &ServicePlace, name: &str) -> PathBuf {
    drop_in_at(place.directory(), name)
}

fn drop_in_at(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.d")).join(FILE)
}

fn enable(args: &ServiceEnable) -> Result<()> {
    let mut named = Named::look(&args.name)?;
    let mut notes = Vec::new();
    if let Some(template) = named.grouped() {
        notes.push(format!("{} only groups instances of {template}, which were enabled instead", named.name));
        named = Named::look(&template)?;
    }
    let refuse = |why: String| anyhow!("{} cannot run under shunt: {why}", named.name);
    let path = path(&args.place, &named.name);
    let before = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let ours = installed(args.broker.as_deref())?;
    let mut settings: Vec<String> = Vec::new();
    for unit in &named.units {
        if let Some(why) = refusal(unit, &ours) {
            return Err(refuse(why));
        }
        // What the drop-in has added is among the properties only if systemd has read it.
        let is_loaded = unit.list("DropInPaths").iter().any(|one| Path::new(one) == path);
        let previous = if is_loaded { &*before } else { "" };
        for line in drop_in::settings(unit, &ours, previous, &resolved).map_err(refuse)? {
            if !settings.contains(&line) {
                settings.push(line);
            }
        }
    }
    let text = drop_in::text(&named.name, &settings);
    if args.print {
        print!("# {}\n{text}", path.display());
        return Ok(());
    }
    notes.extend(remarks(&named, &ours));
    let clusters = clusters::files(&named.units[0], &named.name, Path::new(clusters::DIRECTORY));
    let mut changed = false;
    for file in &clusters {
        changed |= clusters::write(file, &variables(&ours))?;
    }
    if text != before {
        write(&path, &text)?;
        unit::systemctl(&["daemon-reload"])?;
        changed = true;
    }
    let restart = restart_needed(&named, true);
    let mut done = Done {
        unit: named.name.clone(),
        drop_in: path,
        also: clusters,
        changed,
        settings,
        notes,
        restart,
        restarted: false,
    };
    if args.restart {
        done.restart(&named, changed)?;
    }
    done.print(args.json, if changed { "enabled" } else { "already enabled" })
}

fn disable(args: &ServiceDisable) -> Result<()> {
    let names = match &args.name {
        Some(name) => vec![name.clone()],
        None => enabled(&args.place),
    };
    if names.is_empty() && !args.json {
        println!("no service is enabled");
    }
    let mut all = Vec::new();
    for name in &names {
        all.push(disable_one(name, args)?);
    }
    if all.iter().any(|(_, done)| done.changed) {
        unit::systemctl(&["daemon-reload"])?;
    }
    for (named, done) in &mut all {
        if args.restart {
            done.restart(named, done.changed)?;
        }
        done.print(args.json, if done.changed { "disabled" } else { "not enabled" })?;
    }
    Ok(())
}

fn disable_one(name: &str, args: &ServiceDisable) -> Result<(Named, Done)> {
    let mut named = Named::look(name)?;
    if let Some(template) = named.grouped() {
        named = Named::look(&template)?;
    }
    let path = path(&args.place, &named.name);
    let mut changed = false;
    let clusters = clusters::files(&named.units[0], &named.name, Path::new(clusters::DIRECTORY));
    for file in &clusters {
        changed |= clusters::write(file, &[])?;
    }
    match fs::remove_file(&path) {
        Ok(()) => changed = true,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
    // Others may have drop-ins there too.
    let _ = fs::remove_dir(path.parent().unwrap_or(&path));
    let done = Done {
        unit: named.name.clone(),
        drop_in: path,
        also: clusters,
        changed,
        settings: Vec::new(),
        notes: Vec::new(),
        restart: restart_needed(&named, false),
        restarted: false,
    };
    Ok((named, done))
}

impl Done {
    fn restart(&mut self, named: &Named, changed: bool) -> Result<()> {
        // With a changed drop-in, what runs has not seen it.
        let units = if changed { named.active().map(str::to_owned).collect() } else { self.restart.clone() };
        for unit in &units {
            let undo =
                format!("see `journalctl -u {unit}`; `shunt service disable {}` undoes this", self.unit);
            unit::systemctl(&["restart", "--", unit])
                .with_context(|| format!("{unit} has not started again: {undo}"))?;
        }
        self.restarted = !units.is_empty();
        self.restart.clear();
        Ok(())
    }

    fn print(&self, json: bool, what: &str) -> Result<()> {
        if json {
            println!("{}", serde_json::to_string_pretty(self).context("this cannot be printed")?);
            return Ok(());
        }
        println!("{}: {what} ({})", self.unit, self.drop_in.display());
        for file in self.also.iter().filter(|_| self.changed) {
            println!("  also changed: {}", file.display());
        }
        for note in &self.notes {
            println!("  note: {note}");
        }
        if self.restarted {
            println!("  it was restarted");
        }
        if !self.restart.is_empty() {
            println!("  to make it so, restart it: systemctl restart {}", self.restart.join(" "));
        }
        Ok(())
    }
}

/// Returns the units whose running processes are not as the drop-in says.
fn restart_needed(named: &Named, enabled: bool) -> Vec<String> {
    let units = named.units.iter().filter(|unit| named.active().any(|id| id == unit.id()));
    let is_other = |unit: &&Properties| {
        let pids = unit::processes(unit.get("ControlGroup").unwrap_or_default());
        let mut seen = crate::explain::processes(&pids);
        seen.retain(|process| !process.is_hidden());
        match enabled {
            true => {
                !seen.is_empty() && seen.iter().all(|process| !process.under_shunt || process.is_replaced)
            }
            false => seen.iter().any(|process| process.under_shunt),
        }
    };
    units.filter(is_other).map(|unit| unit.id().to_owned()).collect()
}

/// Returns what a service needs of this installation.
fn installed(socket: Option<&Path>) -> Result<Installed> {
    let configured = OfPrograms::of_system().map_err(|faults| anyhow!("{faults}"))?;
    Ok(Installed {
        library: library::find()?,
        broker: std::path::absolute(socket.unwrap_or(Path::new(shunt_broker::SYSTEM_SOCKET)))?,
        command: intercept::path(),
        rules: configured.rules(),
    })
}

/// Returns the variables for programs that do not get the unit's environment.
fn variables(ours: &Installed) -> Vec<(String, String)> {
    let text = |path: &Path| path.display().to_string();
    let mut all = vec![
        ("LD_PRELOAD".to_owned(), text(&ours.library)),
        (shunt_abi::env::BROKER.to_owned(), text(&ours.broker)),
    ];
    all.extend(ours.command.as_deref().map(|path| (shunt_abi::env::INTERCEPT.to_owned(), text(path))));
    all.extend(ours.rules.clone().map(|rules| (shunt_abi::env::RULES.to_owned(), rules)));
    all
}

fn resolved(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Returns why a unit cannot run under shunt, as far as its file and its programs show.
fn refusal(unit: &Properties, ours: &Installed) -> Option<String> {
    match unit.get("LoadState") {
        Some("loaded") => {}
        Some("not-found") => return Some("there is no such unit".into()),
        Some("masked") => return Some(format!("it is masked: `systemctl unmask {}` first", unit.id())),
        other => {
            return Some(format!("systemd has not loaded it: {}", other.unwrap_or("it does not say why")));
        }
    }
    if ["shunt.service", "shunt-relay@", "shunt-overlay"].iter().any(|own| unit.id().starts_with(own)) {
        return Some("it is a part of shunt".into());
    }
    let programs = unit.programs();
    if programs.is_empty() {
        return Some("it starts no program".into());
    }
    for file in unit.environment_files() {
        let text = fs::read_to_string(file).unwrap_or_default();
        if text.lines().any(|line| line.trim_start().starts_with("LD_PRELOAD=")) {
            return Some(format!("{} sets LD_PRELOAD, which goes before the unit's", file.display()));
        }
    }
    let is_root = !unit.is_yes("DynamicUser") && matches!(unit.get("User"), None | Some("" | "root" | "0"));
    let runs_as = RunsAs::service(is_root, unit.is_yes("NoNewPrivileges"));
    if !runs_as.is_root() && !is_for_everyone(&ours.library) {
        return Some(format!("its user may not read {}", ours.library.display()));
    }
    // A disk image shows nothing of its programs.
    if unit.get("RootImage").is_some_and(|image| !image.is_empty()) {
        return None;
    }
    let root = Path::new(unit.get("RootDirectory").filter(|root| !root.is_empty()).unwrap_or("/"));
    programs.iter().find_map(|program| {
        let file = root.join(program.strip_prefix("/").unwrap_or(program));
        let obstacle = obstacle::of_service(&file, runs_as).or_else(|| {
            // Such calls are redirected by `shunt run` only.
            let why = intercept::is_needed_besides(&file, &ours.library);
            why.then(|| Obstacle::OwnCalls("systemd starts it without `shunt run`".into()))
        })?;
        let how = match obstacle.may_be_intercepted() || matches!(obstacle, Obstacle::OwnCalls(_)) {
            true => {
                format!("; `ExecStart=shunt run -- {}` in a drop-in of yours may help", program.display())
            }
            false => String::new(),
        };
        Some(format!("{}: {obstacle}{how}", program.display()))
    })
}

/// Returns whether every user may read a file.
fn is_for_everyone(path: &Path) -> bool {
    let may = |path: &Path, bit| fs::metadata(path).is_ok_and(|data| data.mode() & bit == bit);
    may(path, 0o004) && path.ancestors().skip(1).all(|above| may(above, 0o001))
}

/// Returns what else the user should know.
fn remarks(named: &Named, ours: &Installed) -> Vec<String> {
    let mut notes = Vec::new();
    if let Err(error) = broker::probe(&ours.broker) {
        let path = ours.broker.display();
        notes.push(format!("no broker at {path} ({error}): `systemctl enable --now shunt.socket`"));
    }
    let profiles = fs::read_to_string("/sys/kernel/security/apparmor/profiles").unwrap_or_default();
    for program in named.units.iter().flat_map(Properties::programs) {
        let path = program.display().to_string();
        if profiles
            .lines()
            .any(|line| line.strip_prefix(&path).is_some_and(|rest| rest.starts_with(" (enforce")))
        {
            notes.push(format!(
                "AppArmor confines {path}: its profile must allow `{} mr,` and `{} rw,`",
                ours.library.display(),
                ours.broker.display()
            ));
        }
    }
    notes
}

/// Writes a drop-in as a whole.
fn write(path: &Path, text: &str) -> Result<()> {
    let write = || {
        let directory = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(directory)?;
        let beside = path.with_extension("conf.new");
        let mut file = fs::File::create(&beside)?;
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Returns whether a unit, or its template, is enabled until the next start of the machine or for
/// good.
pub(crate) fn is_enabled(unit: &str) -> bool {
    let template = unit::instance(unit).map(|(template, _)| template);
    let names = [Some(unit.to_owned()), template];
    let places = ["/etc/systemd/system", "/run/systemd/system"].map(Path::new);
    names.iter().flatten().any(|name| places.iter().any(|place| drop_in_at(place, name).exists()))
}

/// Returns the names of the units that have a drop-in.
fn enabled(place: &ServicePlace) -> Vec<String> {
    let entries = fs::read_dir(place.directory()).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.path().join(FILE).exists())
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".d")?.to_owned()))
        .collect();
    names.sort();
    names
}
