//! Objects as API servers send them. The fixtures have the form of version 1.33, in the fields and
//! the order of `k8s.io/api`.

use serde_json::{Value, json};

use super::*;

fn pod() -> Value {
    json!({
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": "db-0", "generateName": "db-", "namespace": "shop",
            "uid": "6f1d6c1c-5c0e-4b0e-9d3b-1f0d8a6a5b11", "resourceVersion": "4711", "generation": 1,
            "creationTimestamp": "2026-11-29T20:00:00Z",
            "labels": { "app": "db", "apps.kubernetes.io/pod-index": "0" },
            "annotations": { "note": "with \u{1f40b} and \"quotes\"" },
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "1", "controller": true }],
            "managedFields": [{ "manager": "kubelet", "operation": "Update", "fieldsV1": { "f:status": {} }, "subresource": "status" }],
        },
        "spec": {
            "volumes": [{ "name": "token", "projected": { "sources": [] } }],
            "initContainers": [{ "name": "sidecar", "image": "i", "restartPolicy": "Always",
                "ports": [{ "name": "metrics", "containerPort": 9100, "protocol": "TCP" }] }],
            "containers": [
                { "name": "db", "image": "postgres", "resources": {}, "ports": [
                    { "name": "sql", "containerPort": 5432, "protocol": "TCP" },
                    { "name": "dns", "containerPort": 53, "protocol": "UDP" },
                    { "containerPort": 8080 } ] },
                { "name": "plain", "image": "p" },
            ],
            "restartPolicy": "Always", "nodeName": "one", "tolerations": [],
        },
        "status": {
            "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }],
            "hostIP": "192.168.0.1", "hostIPs": [{ "ip": "192.168.0.1" }],
            "podIP": "10.50.1.2", "podIPs": [{ "ip": "10.50.1.2" }, { "ip": "fd00:50:1::2" }],
            "startTime": "2026-11-29T20:00:00Z", "qosClass": "BestEffort",
        },
    })
}

fn with(path: &str, value: Value) -> Value {
    let mut pod = pod();
    let (parent, key) = path.rsplit_once('/').unwrap();
    pod.pointer_mut(parent).unwrap()[key] = value;
    pod
}

fn read<K: Kind>(value: &Value) -> Result<Known<K>, Wrong> {
    K::read(&value.to_string())
}

#[test]
fn a_pod_has_addresses_labels_ports_and_a_place() {
    let known = read::<Pod>(&pod()).unwrap();
    assert_eq!(known.version, "4711");
    assert_eq!(known.node.as_deref(), Some("one"));
    let pod = known.object.unwrap();
    assert_eq!((pod.name.as_str(), pod.namespace.as_str()), ("db-0", "shop"));
    assert_eq!(pod.labels["app"], "db");
    let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.50.1.2", "fd00:50:1::2"]);
    assert_eq!(pod.host, Some("192.168.0.1".parse().unwrap()));
    let ports: Vec<(&str, Vec<u16>)> =
        pod.ports.iter().map(|(name, all)| (name.as_str(), all.iter().copied().collect())).collect();
    assert_eq!(ports, [("metrics", vec![9100]), ("sql", vec![5432])]);
}

#[test]
fn pods_without_an_address_of_their_own_are_left_out() {
    let mut unstarted = pod();
    unstarted["status"] = json!({ "phase": "Pending" });
    for left_out in [
        with("/spec/hostNetwork", json!(true)),
        with("/status/phase", json!("Succeeded")),
        with("/status/phase", json!("Failed")),
        unstarted,
        with("/status/podIPs", Value::Null)
            .as_object()
            .map(|it| {
                let mut it = it.clone();
                it["status"]["podIP"] = json!("");
                Value::Object(it)
            })
            .unwrap(),
    ] {
        let known = read::<Pod>(&left_out).unwrap();
        assert_eq!((known.object, known.version.as_str()), (None, "4711"), "{left_out}");
    }
    for kept in [
        with("/spec/hostNetwork", json!(false)),
        with("/status/podIPs", Value::Null),
        with("/metadata/deletionTimestamp", json!("2026-11-29T20:01:00Z")),
        with("/status/phase", json!("Unknown")),
    ] {
        assert!(read::<Pod>(&kept).unwrap().object.is_some(), "{kept}");
    }
    let unplaced = read::<Pod>(&with("/status/hostIP", json!(""))).unwrap().object.unwrap();
    assert_eq!(unplaced.host, None);
}

#[test]
fn values_of_other_types_are_errors() {
    for (path, value) in [
        ("/metadata/labels", json!(["a"])),
        ("/metadata/labels", json!({ "a": 1 })),
        ("/metadata/uid", Value::Null),
        ("/metadata/uid", json!("")),
        ("/metadata/name", json!("")),
        ("/metadata/resourceVersion", json!(7)),
        ("/metadata/resourceVersion", json!("")),
        ("/spec/nodeName", json!(1)),
        ("/spec/hostNetwork", json!("true")),
        ("/spec/containers", json!({})),
        ("/status/podIP", json!("here")),
        ("/status/podIPs", json!([{ "ip": "10.50.1" }])),
        ("/status/hostIP", json!("10.50.1.2/32")),
        ("/status/phase", json!({})),
    ] {
        assert!(read::<Pod>(&with(path, value.clone())).is_err(), "{path} {value}");
    }
    let port = json!([{ "name": "db", "ports": [{ "name": "sql", "containerPort": 70000 }] }]);
    assert!(read::<Pod>(&with("/spec/containers", port)).is_err());
    assert!(Pod::read("[]").is_err() && Pod::read("{}").is_err() && Pod::read("{").is_err());
    let large: Labels = (0..1000).map(|at| (format!("k{at}"), "v".repeat(100))).collect();
    let said = read::<Pod>(&with("/metadata/labels", json!(large))).unwrap_err();
    assert!(said.0.starts_with("db-0 has labels of"), "{said:?}");
}

#[test]
fn absent_and_null_parts_are_empty() {
    let metadata = json!({ "name": "a", "uid": "1", "resourceVersion": "2", "labels": null });
    for (spec, status) in [
        (Value::Null, Value::Null),
        (json!({}), json!({})),
        (json!({ "containers": null }), json!({ "podIPs": null })),
    ] {
        let known = read::<Pod>(&json!({ "metadata": metadata, "spec": spec, "status": status })).unwrap();
        assert_eq!(known.object, None);
    }
    let namespace = read::<Namespace>(&json!({ "metadata": metadata })).unwrap().object.unwrap();
    assert_eq!(namespace, Namespace { name: "a".into(), labels: Labels::new() });
}

#[test]
fn a_namespace_has_labels() {
    let known = read::<Namespace>(&json!({
        "metadata": { "name": "shop", "uid": "2", "resourceVersion": "3",
            "labels": { "kubernetes.io/metadata.name": "shop", "team": "x" } },
        "spec": { "finalizers": ["kubernetes"] }, "status": { "phase": "Active" },
    }));
    assert_eq!(known.unwrap().object.unwrap().labels["team"], "x");
    assert!(read::<Namespace>(&json!({ "metadata": { "name": "shop" } })).is_err());
}

fn policy(spec: Value) -> Policy {
    let metadata = json!({ "name": "db", "namespace": "shop", "uid": "4", "resourceVersion": "5", "generation": 1,
        "annotations": { "a": "tab\tand \u{1f40b}" } });
    let object = json!({ "metadata": metadata, "spec": spec, "status": {} });
    read::<Policy>(&object).unwrap().object.unwrap()
}

#[test]
fn a_network_policy_is_read_as_an_imported_one() {
    let good = policy(json!({
        "podSelector": { "matchLabels": { "app": "db" } },
        "policyTypes": ["Ingress"],
        "ingress": [{ "from": [{ "podSelector": { "matchExpressions": [{ "key": "app", "operator": "In", "values": ["web"] }] } }],
            "ports": [{ "protocol": "TCP", "port": 5432 }, { "protocol": "TCP", "port": "sql" }] }],
    }));
    assert_eq!((good.name.as_str(), good.namespace.as_str()), ("db", "shop"));
    assert!(good.read.is_ok(), "{:?}", good.read);
    for (spec, reason) in [
        (json!({ "podSelector": {}, "newField": 1 }), "there is no key newField"),
        (json!({ "podSelector": {}, "policyTypes": ["Sideways"] }), "there is no type Sideways"),
        (
            json!({ "podSelector": {}, "ingress": [{ "from": [{ "ipBlock": { "cidr": "10" } }] }] }),
            "expected a prefix",
        ),
    ] {
        let refused = policy(spec).read.unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
}
