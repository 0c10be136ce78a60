//! Changes a container's configuration, OCI's config.json, so that its programs run under shunt.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::image;
use crate::mounts::Mount;
use crate::refusal::Refusal;
use crate::rootfs::Rootfs;
use crate::text::{Container, Splice};

/// The paths of the shim and of the broker on the host.
#[derive(Clone, Debug)]
pub struct Host {
    /// The path of libshunt.so.
    pub library: PathBuf,
    /// The directory of the system's broker. It contains no other files of the host.
    pub broker: PathBuf,
}

/// The path of the shim in a container. It equals the path to which `make install` copies it on a
/// host.
pub(crate) const LIBRARY: &str = "/usr/local/lib/shunt/libshunt.so";
/// The directory in which the shim looks for a broker by default.
pub(crate) const BROKER_DIRECTORY: &str = "/run/shunt/broker";
const PRELOAD: &str = "LD_PRELOAD=";

/// The parts of a configuration that are read.
#[derive(Deserialize)]
struct Config {
    root: Root,
    #[serde(default)]
    linux: Linux,
}

/// The root directory of a container.
#[derive(Deserialize)]
struct Root {
    path: PathBuf,
}

impl Root {
    /// Opens the root directory. A relative path starts at `bundle`.
    fn open(self, bundle: &Path) -> Result<Rootfs, Refusal> {
        let root = bundle.join(self.path);
        Rootfs::open(&root).map_err(|source| Refusal::Rootfs { path: root, source })
    }
}

/// The Linux-specific part of a configuration.
#[derive(Default, Deserialize)]
pub(crate) struct Linux {
    #[serde(default)]
    namespaces: Vec<Namespace>,
    #[serde(default)]
    seccomp: Option<Seccomp>,
}

#[derive(Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    /// The path of an existing namespace. Empty if a new one is created.
    #[serde(default)]
    path: String,
}

/// The seccomp filter.
#[derive(Deserialize)]
struct Seccomp {
    #[serde(default, rename = "defaultAction")]
    action: String,
    #[serde(default)]
    syscalls: Vec<Syscalls>,
}

#[derive(Deserialize)]
struct Syscalls {
    action: String,
}

impl Linux {
    /// Returns whether the container has a namespace of this kind.
    pub(crate) fn has(&self, kind: &str) -> bool {
        self.namespaces.iter().any(|namespace| namespace.kind == kind)
    }

    /// Returns whether the container joins an existing namespace of this kind.
    pub(crate) fn joins(&self, kind: &str) -> bool {
        self.namespaces.iter().any(|namespace| namespace.kind == kind && !namespace.path.is_empty())
    }

    /// Returns the path of the namespace of this kind which the container joins. Empty if it gets
    /// a new one.
    pub(crate) fn path(&self, kind: &str) -> &str {
        self.namespaces.iter().find(|namespace| namespace.kind == kind).map_or("", |it| &it.path)
    }

    /// Returns whether the seccomp filter notifies another supervisor of system calls.
    pub(crate) fn shows_calls(&self) -> bool {
        let actions = self.seccomp.iter().flat_map(|filter| {
            filter.syscalls.iter().map(|it| &it.action).chain(std::iter::once(&filter.action))
        });
        actions.into_iter().any(|action| action == "SCMP_ACT_NOTIFY")
    }
}

/// Returns the configuration `text` of the container in `bundle` with shunt added. `None` if it has
/// all of that already.
pub(crate) fn enter(text: &str, bundle: &Path, host: &Host) -> Result<Option<String>, Refusal> {
    let config: Config = serde_json::from_str(text).map_err(not_understood)?;
    if config.linux.has("user") {
        return Err(Refusal::UserNamespace);
    }
    if host.library.file_name() != Path::new(LIBRARY).file_name() {
        return Err(Refusal::NoLibrary(format!("{} has another name", host.library.display())));
    }
    if !host.broker.is_dir() {
        return Err(Refusal::NoBroker(host.broker.clone()));
    }
    let rootfs = config.root.open(bundle)?;
    image::takes(&rootfs, &host.library)?;
    let object = Container::object(text, text.trim()).map_err(not_understood)?;
    let process = object.member("process").ok_or_else(|| missing("process"))?;
    let mut splices = mount(text, &object, host, &rootfs)?;
    splices.extend(preload(text, process)?);
    Ok((!splices.is_empty()).then(|| Splice::apply(splices, text)))
}

/// Returns the description `text` of another process with the shim added, if the configuration
/// `container` has the shim. `None` if there is nothing to add.
pub(crate) fn follow(text: &str, container: &str) -> Result<Option<String>, Refusal> {
    let object = Container::object(container, container.trim()).map_err(not_understood)?;
    let process = object.member("process").ok_or_else(|| missing("process"))?;
    if !preload(container, process)?.is_empty() {
        return Ok(None);
    }
    let splices = preload(text, text.trim())?;
    Ok((!splices.is_empty()).then(|| Splice::apply(splices, text)))
}

/// Returns the changes that add the missing mounts to the configuration `object`.
fn mount(text: &str, object: &Container<'_>, host: &Host, rootfs: &Rootfs) -> Result<Vec<Splice>, Refusal> {
    let there: Vec<Mount> = match object.member("mounts") {
        Some(mounts) => serde_json::from_str(mounts).map_err(not_understood)?,
        None => Vec::new(),
    };
    let there: Vec<Mount> = there.into_iter().map(|mount| mount.resolved(rootfs)).collect();
    let shim = Mount::read_only(directory_of(&host.library), directory_of(Path::new(LIBRARY)));
    let broker = Mount::read_only(&host.broker, Path::new(BROKER_DIRECTORY));
    let mut added = Vec::new();
    for mount in [shim, broker] {
        if mount.clone().resolved(rootfs).is_missing(&there, rootfs)? {
            added.push(serde_json::to_string(&mount).map_err(not_understood)?);
        }
    }
    if added.is_empty() {
        return Ok(Vec::new());
    }
    add(text, object, "mounts", &added.join(",")).map(|splice| vec![splice])
}

fn directory_of(library: &Path) -> &Path {
    library.parent().unwrap_or(Path::new("/"))
}

/// Returns the changes that add the shim to the environment of `process`, a part of `text`. The
/// shim is put before existing entries of LD_PRELOAD, as `shunt run` does.
fn preload(text: &str, process: &str) -> Result<Vec<Splice>, Refusal> {
    let process = Container::object(text, process).map_err(not_understood)?;
    let alone = quoted(&format!("{PRELOAD}{LIBRARY}"))?;
    let Some(env) = process.member("env") else {
        return Ok(vec![add(text, &process, "env", &alone)?]);
    };
    let variables = Container::array(text, env).map_err(not_understood)?;
    let mut splices = Vec::new();
    let mut is_set = false;
    for variable in variables.values() {
        let decoded: String = serde_json::from_str(variable).map_err(not_understood)?;
        let Some(list) = decoded.strip_prefix(PRELOAD) else { continue };
        is_set = true;
        if !list.split([' ', ':']).any(|entry| entry == LIBRARY) {
            let separator = if list.is_empty() { "" } else { ":" };
            let merged = quoted(&format!("{PRELOAD}{LIBRARY}{separator}{list}"))?;
            splices.push(Splice::replace(text, variable, merged));
        }
    }
    if !is_set {
        splices.push(variables.append(text, &alone));
    }
    Ok(splices)
}

/// Adds elements to the array `name` of `object`. The array is created if it does not exist.
fn add(text: &str, object: &Container<'_>, name: &str, elements: &str) -> Result<Splice, Refusal> {
    match object.member(name) {
        Some(array) => Ok(Container::array(text, array).map_err(not_understood)?.append(text, elements)),
        None => Ok(object.append(text, &format!("\"{name}\":[{elements}]"))),
    }
}

fn quoted(text: &str) -> Result<String, Refusal> {
    serde_json::to_string(text).map_err(not_understood)
}

fn missing(name: &str) -> Refusal {
    Refusal::NotUnderstood(format!("it has no {name}"))
}

pub(crate) fn not_understood(error: serde_json::Error) -> Refusal {
    Refusal::NotUnderstood(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::Fixture;
    use proptest::prelude::*;
    use serde_json::value::RawValue;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;

    impl Fixture {
        fn host(&self) -> Host {
            Host { library: self.library(), broker: self.path("broker") }
        }

        fn enter(&self, text: &str) -> Result<Option<String>, Refusal> {
            enter(text, &self.path("bundle"), &self.host())
        }
    }

    fn config(environment: &[&str]) -> Value {
        json!({ "process": { "env": environment }, "root": { "path": "rootfs" } })
    }

    #[test]
    fn a_container_gets_the_shim_the_brokers_directory_and_the_variable() {
        let fixture = Fixture::new();
        let changed = fixture.enter(&config(&["PATH=/bin"]).to_string()).unwrap().unwrap();
        let value: Value = serde_json::from_str(&changed).unwrap();
        assert_eq!(value["process"]["env"], json!(["PATH=/bin", format!("LD_PRELOAD={LIBRARY}")]));
        let options = ["bind", "ro", "nosuid", "nodev", "rprivate"];
        let mount = |source: &str, destination: &str| {
            let source = fixture.path(source);
            json!({ "destination": destination, "type": "bind", "source": source, "options": options })
        };
        let mounts = json!([mount("host", "/usr/local/lib/shunt"), mount("broker", BROKER_DIRECTORY)]);
        assert_eq!(value["mounts"], mounts);
        assert_eq!(fixture.enter(&changed).unwrap(), None, "it has everything then");
    }

    #[test]
    fn what_is_preloaded_already_comes_behind_the_shim() {
        for (before, after) in [
            ("", LIBRARY.to_owned()),
            ("/a.so", format!("{LIBRARY}:/a.so")),
            ("/a.so /b.so:c.so", format!("{LIBRARY}:/a.so /b.so:c.so")),
            ("/a.so:/usr/local/lib/shunt/libshunt.so", format!("/a.so:{LIBRARY}")),
        ] {
            let text =
                json!({ "env": ["LD_PRELOADED=x", format!("LD_PRELOAD={before}"), "A=b"] }).to_string();
            let changed = Splice::apply(preload(&text, &text).unwrap(), &text);
            let value: Value = serde_json::from_str(&changed).unwrap();
            assert_eq!(value["env"], json!(["LD_PRELOADED=x", format!("LD_PRELOAD={after}"), "A=b"]));
        }
    }

    #[test]
    fn another_process_is_as_its_container() {
        let (with, without) =
            (config(&[&format!("LD_PRELOAD=/a.so:{LIBRARY}")]), config(&["LD_PRELOAD=/a.so"]));
        let process = json!({ "env": ["A=b"] }).to_string();
        let changed = follow(&process, &with.to_string()).unwrap().unwrap();
        let value: Value = serde_json::from_str(&changed).unwrap();
        assert_eq!(value, json!({ "env": ["A=b", format!("LD_PRELOAD={LIBRARY}")] }));
        assert_eq!(follow(&changed, &with.to_string()).unwrap(), None);
        assert_eq!(follow(&process, &without.to_string()).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_under_shunt_or_is_not_understood_is_said() {
        let fixture = Fixture::new();
        let said = |value: Value| fixture.enter(&value.to_string()).unwrap_err().to_string();
        let mut user = config(&[]);
        user["linux"] = json!({ "namespaces": [{ "type": "mount" }, { "type": "user" }] });
        assert!(said(user).contains("user namespace"));
        let mut elsewhere = config(&[]);
        elsewhere["root"]["path"] = json!("no/such");
        assert!(said(elsewhere).contains("no/such"));
        let mut taken = config(&[]);
        taken["mounts"] = json!([{ "destination": "/run/shunt/broker", "type": "tmpfs" }]);
        assert!(said(taken).contains("/run/shunt/broker"));
        for strange in [
            json!({ "root": { "path": "rootfs" } }),
            json!({ "process": {} }),
            json!({ "process": { "env": [1] }, "root": { "path": "rootfs" } }),
            json!({ "process": [], "root": { "path": "rootfs" } }),
            json!({ "process": {}, "mounts": {}, "root": { "path": "rootfs" } }),
            json!([]),
        ] {
            assert!(said(strange).contains("not understood"));
        }
        let other = Host { library: fixture.path("host/libshunt.so.1"), ..fixture.host() };
        let refusal = enter(&config(&[]).to_string(), &fixture.path("bundle"), &other).unwrap_err();
        assert!(
            matches!(refusal, Refusal::NoLibrary(_)),
            "its directory has no file of the name in LD_PRELOAD"
        );
        std::fs::remove_dir(fixture.path("broker")).unwrap();
        assert!(said(config(&[])).contains("no broker"));
    }

    /// Returns JSON values as other programs may write them, for example numbers that do not fit
    /// any Rust type.
    fn any_text() -> impl Strategy<Value = String> {
        let leaf = prop::sample::select(vec![
            "null",
            "true",
            "-0",
            "1.50",
            "1e+05",
            "-12345678901234567890123.000",
            "\"\\u0041\\/\"",
            "\"é \\\" }]\"",
        ]);
        let space = prop::sample::select(vec!["", " ", "\n\t", "\r\n    "]);
        leaf.prop_map(str::to_owned).prop_recursive(3, 24, 4, move |inner| {
            let array = (prop::collection::vec(inner.clone(), 0..4), space.clone())
                .prop_map(|(items, space)| format!("[{space}{}{space}]", items.join(&format!(",{space}"))));
            let object = members(inner).prop_map(|members| as_object(&members));
            prop_oneof![array, object]
        })
    }

    /// Returns members with distinct names without meaning, in any order.
    fn members(value: impl Strategy<Value = String>) -> impl Strategy<Value = Vec<(String, String)>> {
        let named = prop::collection::btree_map("x[a-z]{0,2}|x\\.é", value, 0..5);
        named.prop_map(|members| members.into_iter().collect::<Vec<_>>()).prop_shuffle()
    }

    fn as_object(members: &[(String, String)]) -> String {
        let member = |(name, value): &(String, String)| format!("\"{name}\" : {value}");
        format!("{{ {} }}", members.iter().map(member).collect::<Vec<_>>().join(" ,\n"))
    }

    fn parse(text: &str) -> BTreeMap<String, &RawValue> {
        serde_json::from_str(text).unwrap()
    }

    /// Asserts that all members of `before` except `but` are in `after`, byte for byte.
    fn assert_kept(before: &str, after: &str, but: &[&str]) {
        let after = parse(after);
        for (name, value) in parse(before) {
            if !but.contains(&name.as_str()) {
                assert_eq!(after[&name].get(), value.get(), "{name}");
            }
        }
    }

    fn array<'t>(object: &BTreeMap<String, &'t RawValue>, name: &str) -> Vec<&'t str> {
        let elements = |array: &&'t RawValue| serde_json::from_str::<Vec<&RawValue>>(array.get()).unwrap();
        object.get(name).map(elements).unwrap_or_default().into_iter().map(RawValue::get).collect()
    }

    fn put(members: &mut Vec<(String, String)>, place: &prop::sample::Index, name: &str, value: String) {
        members.insert(place.index(members.len() + 1), (name.to_owned(), value));
    }

    #[test]
    fn nothing_else_changes() {
        let fixture = Fixture::new();
        let variables = prop::option::of(prop::collection::vec("[A-Z]{1,4}=[ -~é]{0,6}", 0..4));
        proptest!(|(
            mut config in members(any_text()),
            mut process in members(any_text()),
            variables in variables,
            mounts in prop::option::of(0..3_usize),
            places in any::<[prop::sample::Index; 4]>(),
        )| {
            if let Some(variables) = variables {
                put(&mut process, &places[0], "env", serde_json::to_string(&variables).unwrap());
            }
            put(&mut config, &places[1], "process", as_object(&process));
            put(&mut config, &places[2], "root", "{\"path\": \"rootfs\", \"readonly\":true}".to_owned());
            if let Some(count) = mounts {
                let mount = "{\"options\":[ ],\"destination\" : \"/proc\", \"x\": 1.00}";
                put(&mut config, &places[3], "mounts", format!("[{}]", vec![mount; count].join(" , ")));
            }
            let before = as_object(&config);
            let after = fixture.enter(&before).unwrap().unwrap();
            assert_kept(&before, &after, &["process", "mounts"]);
            let (was, is) = (parse(&before), parse(&after));
            let (process_was, process_is) = (was["process"].get(), is["process"].get());
            assert_kept(process_was, process_is, &["env"]);
            for (was, is, added) in [
                (array(&parse(process_was), "env"), array(&parse(process_is), "env"), 1),
                (array(&was, "mounts"), array(&is, "mounts"), 2),
            ] {
                prop_assert_eq!(&is[..was.len()], &was[..]);
                prop_assert_eq!(is.len(), was.len() + added);
            }
        });
    }
}
