//! The manifests of packaging/kubernetes: they are what the router needs, and the Helm chart renders
//! to the same.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::settings::Settings;
use super::typed::{Kind, Namespace, Pod, Policy};
use super::yaml::{Node, parse};

fn read(name: &str) -> String {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../../packaging/kubernetes", name].iter().collect();
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns a manifest without the comments before its first object.
fn objects(text: &str) -> String {
    let lines = text.lines().skip_while(|line| line.starts_with('#'));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Renders a template of the chart with its default values. The templates have values only, also as
/// JSON.
fn rendered(template: &str) -> String {
    let values = read("chart/values.yaml");
    let parsed = parse(&values).unwrap();
    let entries = Node::of(&parsed[0]).entries().unwrap();
    let mut known: BTreeMap<String, String> =
        [(".Release.Namespace".to_owned(), "kube-system".to_owned())].into();
    for (key, value) in entries {
        let (name, text) = (format!(".Values.{key}"), value.text().map(str::to_owned));
        let text = text.or_else(|_| match value.items() {
            Ok(items) => {
                let items: Vec<&str> = items.into_iter().map(|it| it.text().unwrap()).collect();
                Ok::<_, ()>(serde_json::to_string(&items).unwrap())
            }
            Err(_) => Ok(value.is_true().to_string()),
        });
        known.insert(name, text.unwrap());
    }
    let mut text = read(&format!("chart/templates/{template}"));
    while let Some((before, rest)) = text.split_once("{{ ") {
        let (name, after) = rest.split_once(" }}").unwrap();
        let name = name.trim_end_matches(" | toJson");
        text = format!("{before}{}{after}", known.get(name).unwrap_or_else(|| panic!("no value {name}")));
    }
    text
}

#[test]
fn the_chart_renders_to_the_manifests() {
    for (manifest, template) in [
        ("rbac.yaml", "rbac.yaml"),
        ("overlay-router.yaml", "router.yaml"),
        ("runtimeclass.yaml", "runtimeclass.yaml"),
    ] {
        assert_eq!(rendered(template), objects(&read(manifest)), "{template}");
    }
}

/// Returns the items of a list as texts.
fn texts<'a>(node: Node<'a>, key: &str) -> Vec<&'a str> {
    node.list(key).unwrap().into_iter().map(|it| it.text().unwrap()).collect()
}

#[test]
fn the_account_may_watch_what_the_router_asks_for() {
    let text = read("rbac.yaml");
    let documents = parse(&text).unwrap();
    let all: Vec<Node<'_>> = documents.iter().map(Node::of).collect();
    let name =
        |node: Node<'_>| node.need("metadata").unwrap().need("name").unwrap().text().unwrap().to_owned();
    let kinds: Vec<&str> = all.iter().map(|it| it.need("kind").unwrap().text().unwrap()).collect();
    assert_eq!(kinds, ["ServiceAccount", "ClusterRole", "ClusterRoleBinding"]);
    assert!(all.iter().all(|it| name(*it) == "shunt-overlay"));
    let mut permitted = Vec::new();
    for rule in all[1].list("rules").unwrap() {
        rule.only(&["apiGroups", "resources", "verbs"]).unwrap();
        assert_eq!(texts(rule, "verbs"), ["get", "list", "watch"]);
        for group in texts(rule, "apiGroups") {
            let root = if group.is_empty() { "/api/v1".to_owned() } else { format!("/apis/{group}/v1") };
            permitted.extend(texts(rule, "resources").into_iter().map(|it| format!("{root}/{it}")));
        }
    }
    assert_eq!(permitted, [Pod::PATH, Namespace::PATH, Policy::PATH], "no less, and no more");
}

#[test]
fn the_router_of_a_node_has_a_configuration_that_it_understands() {
    let text = read("overlay-router.yaml");
    let documents = parse(&text).unwrap();
    let [map, set] = [0, 1].map(|at| Node::of(&documents[at]));
    let configuration = map.need("data").unwrap().need("overlay.toml").unwrap().text().unwrap();
    let config: crate::config::Config =
        shunt_config::parse(Path::new("overlay.toml"), configuration).unwrap();
    assert_eq!(config.kubernetes, Some(Settings::default()));
    assert!(config.secure && config.name.is_empty() && config.hosts.is_empty());
    let spec = set.need("spec").unwrap().need("template").unwrap().need("spec").unwrap();
    assert_eq!(spec.need("serviceAccountName").unwrap().text().unwrap(), "shunt-overlay");
    let [container] = spec.list("containers").unwrap()[..] else { panic!("one container") };
    // The command line names the host, from the pod's own fields.
    let command = texts(container, "command");
    let flag = |name: &str| command[command.iter().position(|it| *it == name).unwrap() + 1].to_owned();
    let mut fields = BTreeMap::new();
    for variable in container.list("env").unwrap() {
        let field = variable.need("valueFrom").unwrap().need("fieldRef").unwrap().need("fieldPath").unwrap();
        fields
            .insert(format!("$({})", variable.need("name").unwrap().text().unwrap()), field.text().unwrap());
    }
    assert_eq!(fields[&flag("--name")], "spec.nodeName");
    assert_eq!(fields[&flag("--address")], "status.hostIP");
    // Each path is below a mount, and each mount has a volume.
    let mounts = container.list("volumeMounts").unwrap();
    let place = |node: &Node<'_>, key: &str| node.need(key).unwrap().text().unwrap().to_owned();
    let volumes = spec.list("volumes").unwrap();
    for path in [flag("--config"), config.key.display().to_string()] {
        assert!(mounts.iter().any(|it| Path::new(&path).starts_with(place(it, "mountPath"))), "{path}");
    }
    for directory in [config.socket.parent().unwrap(), config.control.parent().unwrap()] {
        assert!(mounts.iter().any(|it| directory == Path::new(&place(it, "mountPath"))), "{directory:?}");
    }
    for mount in &mounts {
        assert!(volumes.iter().any(|it| place(it, "name") == place(mount, "name")));
    }
}
