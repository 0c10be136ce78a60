//! The API server in the configuration, and the credentials for it: those of a service account are
//! replaced each hour.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::header::HeaderValue;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio_rustls::rustls::ClientConfig;

use crate::external::{self, FileError};

/// The directory of a pod's credentials.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// `[kubernetes]` in the configuration. Empty, it is that of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Settings {
    /// The API server. `None`: the one of this pod's cluster.
    pub(crate) server: Option<Server>,
    /// Certificates, one of which has signed the server's.
    pub(crate) ca: Option<PathBuf>,
    pub(crate) token: Option<PathBuf>,
    /// The certificate by which this router is known to the server, and its key.
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) private_key: Option<PathBuf>,
    /// The name of this host's node. `None`: the router's name.
    pub(crate) node: Option<String>,
    /// Enforce the cluster's NetworkPolicies.
    #[serde(default)]
    pub(crate) network_policies: bool,
}

/// The file has it as https://HOST:PORT.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Server(pub(crate) external::Server);

impl TryFrom<String> for Server {
    type Error = String;

    fn try_from(text: String) -> Result<Server, String> {
        let place = text.strip_prefix("https://").map(|place| place.trim_end_matches('/'));
        place.and_then(|place| external::Server::parse(place, Some(443))).map(Server).ok_or_else(|| {
            format!("{text:?} is no API server: say https://HOST:PORT, as in \"https://192.168.0.10:6443\"")
        })
    }
}

impl From<Server> for String {
    fn from(Server(server): Server) -> String {
        format!("https://{}", server.authority())
    }
}

impl Server {
    /// Returns the API server of this pod's cluster.
    fn of_pod(get: impl Fn(&str) -> Option<String>) -> Option<Server> {
        let (host, port) = (get("KUBERNETES_SERVICE_HOST")?, get("KUBERNETES_SERVICE_PORT")?);
        Some(Server(external::Server { host, port: port.parse().ok()? }))
    }
}

/// The reason for which there are no credentials.
#[derive(Debug, Error)]
pub(crate) enum CredentialsError {
    #[error("this router is in no pod, and the configuration names no server")]
    NoServer,
    #[error("{0}")]
    File(#[from] FileError),
}

/// What a connection needs.
pub(super) struct Credentials {
    pub(super) server: external::Server,
    pub(super) tls: Arc<ClientConfig>,
    /// The header Authorization.
    pub(super) bearer: Option<HeaderValue>,
}

impl Settings {
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.certificate.is_some() != self.private_key.is_some() {
            return Err("kubernetes: certificate and private-key belong together: say both, or none".into());
        }
        if self.server.is_some() && self.ca.is_none() {
            return Err("kubernetes: server needs ca, the file with the cluster's certificate: as certificate-authority in a kubeconfig".into());
        }
        if self.server.is_some() && self.token.is_none() && self.certificate.is_none() {
            return Err(
                "kubernetes: server needs token, or certificate and private-key: who this router is to it"
                    .into(),
            );
        }
        Ok(())
    }

    /// Reads all files.
    pub(super) fn credentials(&self) -> Result<Credentials, CredentialsError> {
        let in_pod = self.server.is_none();
        let server = self.server.clone().or_else(|| Server::of_pod(|name| std::env::var(name).ok()));
        let Server(server) = server.ok_or(CredentialsError::NoServer)?;
        let default = |name: &str| in_pod.then(|| Path::new(ACCOUNT).join(name));
        let ca = self.ca.clone().or_else(|| default("ca.crt"));
        let token = self.token.clone().or_else(|| default("token").filter(|_| self.certificate.is_none()));
        let bearer = token.map(|path| bearer(&path)).transpose()?;
        let own = self.certificate.as_deref().zip(self.private_key.as_deref());
        Ok(Credentials { server, tls: external::client(ca.as_deref(), own)?, bearer })
    }
}

fn bearer(path: &Path) -> Result<HeaderValue, FileError> {
    let bytes = external::read(path)?;
    let token = bytes.trim_ascii();
    let header = HeaderValue::from_bytes(&[b"Bearer ", token].concat());
    match header {
        Ok(mut header) if !token.is_empty() => {
            header.set_sensitive(true);
            Ok(header)
        }
        _ => Err(FileError::content(path)("this is no token")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_one_of_https() {
        let server = |text: &str| Server::try_from(text.to_owned());
        for text in ["https://192.168.0.10:6443", "https://[2001:db8::1]:6443", "https://api.example.com:443"]
        {
            assert_eq!(String::from(server(text).unwrap()), text);
        }
        assert_eq!(server("https://a/").unwrap().0.authority(), "a:443");
        for wrong in ["", "https://", "http://a:1", "a:1", "https://a/b"] {
            assert!(server(wrong).unwrap_err().contains("is no API server"), "{wrong}");
        }
    }

    #[test]
    fn a_pod_knows_its_server() {
        let get = |name: &str| match name {
            "KUBERNETES_SERVICE_HOST" => Some("fd00::1".to_owned()),
            "KUBERNETES_SERVICE_PORT" => Some("443".to_owned()),
            _ => None,
        };
        assert_eq!(Server::of_pod(get).unwrap().0.authority(), "[fd00::1]:443");
        assert_eq!(Server::of_pod(|_| None), None);
    }

    #[test]
    fn what_is_missing_is_said() {
        let settings = |text: &str| toml::from_str::<Settings>(text).unwrap().check();
        settings("").unwrap();
        settings("server = 'https://a:1'\nca = 'c'\ntoken = 't'").unwrap();
        for (text, complaint) in [
            ("certificate = 'c'", "belong together"),
            ("server = 'https://a:1'\ntoken = 't'", "needs ca"),
            ("server = 'https://a:1'\nca = 'c'", "needs token"),
        ] {
            let said = settings(text).unwrap_err();
            assert!(said.contains(complaint), "{said}");
        }
    }

    #[test]
    fn a_token_is_read_each_time_and_must_be_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        assert!(matches!(bearer(&path), Err(FileError::File { .. })));
        for (text, expected) in
            [("one\n", Some("Bearer one")), ("two", Some("Bearer two")), ("\n", None), ("a\nb", None)]
        {
            std::fs::write(&path, text).unwrap();
            let header = bearer(&path).ok();
            assert_eq!(header.as_ref().map(|it| it.to_str().unwrap()), expected);
        }
    }
}
