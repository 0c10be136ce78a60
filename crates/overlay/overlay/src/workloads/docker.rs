//! Asks Docker's API for the containers that run, with their labels and addresses. Podman's service
//! answers the same request.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::Request;
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::{Labels, Workload};

/// The largest answer.
const ANSWER: usize = 64 << 20;
/// The time for one answer.
const LIMIT: Duration = Duration::from_secs(5);

/// The reason for which Docker did not answer.
#[derive(Debug, Error)]
pub(crate) enum DockerError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("it answers {0}")]
    Refused(hyper::StatusCode),
    #[error("its answer is not understood: {0}")]
    Answer(#[from] serde_json::Error),
    #[error("its answer is too long: {0}")]
    Long(Box<dyn std::error::Error + Send + Sync>),
    #[error("it does not answer")]
    Late,
}

/// Returns the containers that run, by their addresses.
pub(crate) async fn containers(socket: &Path) -> Result<Vec<(IpAddr, Arc<Workload>)>, DockerError> {
    timeout(LIMIT, ask(socket)).await.unwrap_or(Err(DockerError::Late))
}

async fn ask(socket: &Path) -> Result<Vec<(IpAddr, Arc<Workload>)>, DockerError> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the body of the one answer on this connection.
    tokio::spawn(connection);
    let request = Request::get("/containers/json")
        .header(HOST, "docker")
        .body(Empty::<Bytes>::new())
        .expect("the parts are fit for a request");
    let answer = sender.send_request(request).await?;
    if !answer.status().is_success() {
        return Err(DockerError::Refused(answer.status()));
    }
    let body = Limited::new(answer.into_body(), ANSWER).collect().await.map_err(DockerError::Long)?;
    parse(&body.to_bytes())
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    id: String,
    #[serde(default)]
    names: Vec<String>,
    labels: Option<Labels>,
    network_settings: Option<NetworkSettings>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct NetworkSettings {
    networks: Option<BTreeMap<String, Endpoint>>,
}

#[derive(Deserialize)]
struct Endpoint {
    #[serde(rename = "IPAddress", default)]
    ipv4: String,
    #[serde(rename = "GlobalIPv6Address", default)]
    ipv6: String,
}

fn parse(answer: &[u8]) -> Result<Vec<(IpAddr, Arc<Workload>)>, DockerError> {
    let containers: Vec<Container> = serde_json::from_slice(answer)?;
    let mut found = Vec::new();
    for Container { id, names, labels, network_settings } in containers {
        let workload = Arc::new(Workload {
            name: names.first().map_or(id, |name| name.trim_start_matches('/').to_owned()),
            namespace: None,
            labels: labels.unwrap_or_default(),
            // A container without a namespace has no labels of one, for certain.
            namespace_labels: Some(Labels::new()),
            ports: BTreeMap::new(),
        });
        let endpoints = network_settings.and_then(|it| it.networks).unwrap_or_default();
        for Endpoint { ipv4, ipv6 } in endpoints.into_values() {
            let addresses = [ipv4, ipv6].into_iter().filter_map(|it| it.parse().ok());
            found.extend(addresses.map(|address| (address, workload.clone())));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_have_the_addresses_of_their_networks() {
        let answer = r#"[
            {"Id":"1f","Names":["/web"],"Labels":{"app":"web"},"State":"running","NetworkSettings":{"Networks":{
                "across":{"IPAddress":"10.50.1.2","GlobalIPv6Address":"fd00::2","NetworkID":"7"},"none":{"IPAddress":""}}}},
            {"Id":"2f","Names":[],"Labels":null,"NetworkSettings":{"Networks":null}},
            {"Id":"3f","NetworkSettings":{"Networks":{"bridge":{"IPAddress":"172.17.0.2"}}}}]"#;
        let found = parse(answer.as_bytes()).unwrap();
        let listed: Vec<_> = found
            .iter()
            .map(|(address, it)| (address.to_string(), it.name.as_str(), it.labels.len()))
            .collect();
        let expected = [("10.50.1.2", "web", 1), ("fd00::2", "web", 1), ("172.17.0.2", "3f", 0)];
        assert_eq!(listed, expected.map(|(address, name, labels)| (address.to_owned(), name, labels)));
        assert!(parse(b"{}").is_err());
    }
}
