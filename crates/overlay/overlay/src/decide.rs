//! Explains the policy's verdict about a connection, for operators: which containers its ends are, and
//! which rules decide.

use std::net::IpAddr;

use serde_json::{Value, json};

use crate::policy::{Deciding, Denial, Doubt, Flow, InEffect, Verdict};
use crate::workloads::Identity;

/// The largest number of rules that are named. If labels are not known, thousands may decide.
const MOST: usize = 20;

/// Returns the verdict and its reasons.
pub(crate) fn report(policy: &InEffect, flow: Flow) -> Value {
    let verdict = policy.verdict(flow);
    let (deciding, possible) = match verdict {
        Verdict::Unclear(_) => (Vec::new(), policy.possible_rules(flow)),
        _ => (policy.deciding(flow), Vec::new()),
    };
    let names: Vec<&str> = policy.policy.names().collect();
    let decided_by =
        |it: &Deciding| json!({ "direction": it.direction, "rule": it.rule.map(|rule| names[rule]) });
    json!({
        "verdict": label(verdict),
        "client": end(policy, flow.source),
        "server": end(policy, flow.destination.ip()),
        "decided-by": deciding.iter().map(decided_by).collect::<Vec<_>>(),
        "possible-rules": possible.iter().take(MOST).map(|rule| names[*rule]).collect::<Vec<_>>(),
        "possible-rules-left-out": possible.len().saturating_sub(MOST),
    })
}

fn label(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Allow(_) => "allow",
        Verdict::Overlay => "overlay",
        Verdict::Deny(Denial::Refused) => "deny",
        Verdict::Deny(Denial::TimedOut) => "drop",
        Verdict::Unclear(Doubt::Labels) => "unknown-labels",
        Verdict::Unclear(Doubt::SourcePort) => "depends-on-the-clients-port",
    }
}

fn end(policy: &InEffect, address: IpAddr) -> Value {
    match policy.workloads.of(address) {
        Identity::Known(workload) => json!({
            "is": "known",
            "name": workload.name,
            "namespace": workload.namespace,
            "labels": workload.labels,
        }),
        Identity::Unknown => json!({ "is": "unknown" }),
        Identity::Outside => json!({ "is": "outside" }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::policy::Policy;
    use crate::workloads::{Labels, Workload, Workloads};

    #[test]
    fn a_verdict_is_given_with_its_rules() {
        let text = "default = 'deny'\n\
             [[rule]]\nname = 'ssh'\naction = 'drop'\nports = [22]\n\
             [[rule]]\nname = 'web'\naction = 'allow'\ndirection = 'ingress'\nfrom = [{ labels = 'app=web' }]\n\
             [[rule]]\nname = 'all'\naction = 'allow'\ndirection = 'egress'\n\
             [[rule]]\nname = 'low'\naction = 'overlay'\nports = [111]\nsource-ports = ['1-1023']\n";
        let policy = Policy::parse("f".as_ref(), text).unwrap();
        let mut workloads = Workloads::new(vec!["10.50.0.0/16".parse().unwrap()], [].into());
        let workload = Workload {
            name: "web-1".to_owned(),
            namespace: Some("shop".to_owned()),
            labels: Labels::from([("app".to_owned(), "web".to_owned())]),
            namespace_labels: None,
            ports: [].into(),
        };
        workloads.add("10.50.1.2".parse().unwrap(), Arc::new(workload));
        let policy = InEffect::new(Arc::new(policy), Arc::new(workloads));
        let decided = |client: &str, server: &str| {
            let flow = Flow {
                source: client.parse().unwrap(),
                source_port: None,
                destination: server.parse().unwrap(),
            };
            report(&policy, flow)
        };
        let by = |direction: &str, rule: Option<&str>| json!({ "direction": direction, "rule": rule });
        let allowed = decided("10.50.1.2", "10.50.2.2:80");
        assert_eq!(allowed["verdict"], "allow");
        assert_eq!(allowed["decided-by"], json!([by("egress", Some("all")), by("ingress", Some("web"))]));
        assert_eq!(allowed["client"]["name"], "web-1");
        assert_eq!(allowed["server"], json!({ "is": "unknown" }));
        let dropped = decided("10.50.1.9", "10.50.2.2:22");
        assert_eq!(dropped["verdict"], "drop");
        assert_eq!(dropped["decided-by"], json!([{ "direction": null, "rule": "ssh" }]));
        let denied = decided("203.0.113.9", "10.50.2.2:80");
        assert_eq!(denied["verdict"], "deny");
        assert_eq!(denied["decided-by"], json!([by("egress", Some("all")), by("ingress", None)]));
        let of_itself = decided("10.50.1.2", "10.50.1.2:80");
        assert_eq!(of_itself["decided-by"], json!([{ "direction": null, "rule": null }]));
        let unclear = decided("10.50.1.9", "10.50.2.2:80");
        assert_eq!((&unclear["verdict"], &unclear["decided-by"]), (&json!("unknown-labels"), &json!([])));
        assert_eq!(unclear["possible-rules"], json!(["all", "web"]));
        let by_port = decided("10.50.1.2", "10.50.2.2:111");
        assert_eq!(by_port["verdict"], "depends-on-the-clients-port");
        assert_eq!(by_port["possible-rules"], json!(["low", "all", "web"]));
    }
}
