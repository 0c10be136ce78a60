//! The API server in the configuration, and the credentials for it. Their files are read for each
//! connection, since they are replaced while the router runs: tokens of service accounts each hour.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use hyper::header::HeaderValue;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// The directory of a pod's credentials.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The largest file with credentials.
const LARGEST: u64 = 1 << 20;

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

/// Host and port. The file has them as https://HOST:PORT.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Server {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl TryFrom<String> for Server {
    type Error = String;

    fn try_from(text: String) -> Result<Server, String> {
        let wrong = || {
            format!("{text:?} is no API server: say https://HOST:PORT, as in \"https://192.168.0.10:6443\"")
        };
        let place =
            text.strip_prefix("https://").map(|place| place.trim_end_matches('/')).ok_or_else(wrong)?;
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !host.ends_with(':') && !port.contains(']') => {
                (host, port.parse::<u16>().ok().filter(|port| *port != 0).ok_or_else(wrong)?)
            }
            _ => (place, 443),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match ServerName::try_from(host) {
            Ok(_) => Ok(Server { host: host.to_owned(), port }),
            Err(_) => Err(wrong()),
        }
    }
}

impl From<Server> for String {
    fn from(server: Server) -> String {
        format!("https://{}", server.authority())
    }
}

impl Server {
    /// Returns host and port as a URL has them.
    pub(crate) fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// Returns the API server of this pod's cluster.
    fn of_pod(get: impl Fn(&str) -> Option<String>) -> Option<Server> {
        let (host, port) = (get("KUBERNETES_SERVICE_HOST")?, get("KUBERNETES_SERVICE_PORT")?);
        Some(Server { host, port: port.parse().ok()? })
    }
}

/// The reason for which there are no credentials.
#[derive(Debug, Error)]
pub(crate) enum CredentialsError {
    #[error("this router is in no pod, and the configuration names no server")]
    NoServer,
    #[error("{}: {source}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: {what}", .path.display())]
    Content { path: PathBuf, what: String },
}

/// What a connection needs.
pub(super) struct Credentials {
    pub(super) server: Server,
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
        let server = server.ok_or(CredentialsError::NoServer)?;
        let default = |name: &str| in_pod.then(|| Path::new(ACCOUNT).join(name));
        let ca = self.ca.clone().or_else(|| default("ca.crt"));
        let token = self.token.clone().or_else(|| default("token").filter(|_| self.certificate.is_none()));
        let bearer = token.map(|path| bearer(&path)).transpose()?;
        let mut roots = RootCertStore::empty();
        if let Some(path) = &ca {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(content(path))?;
            }
        }
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let builder = builder.expect("the provider has TLS 1.3").with_root_certificates(roots);
        let mut tls = match (&self.certificate, &self.private_key) {
            (Some(certificate), Some(key)) => {
                let parsed = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(content(key))?;
                builder
                    .with_client_auth_cert(certificates(certificate)?, parsed)
                    .map_err(content(certificate))?
            }
            _ => builder.with_no_client_auth(),
        };
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Credentials { server, tls: Arc::new(tls), bearer })
    }
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(aws_lc_rs::default_provider()));
    PROVIDER.clone()
}

fn read(path: &Path) -> Result<Vec<u8>, CredentialsError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST).read_to_end(&mut bytes));
    read.map(|_| bytes).map_err(|source| CredentialsError::File { path: path.to_owned(), source })
}

fn content<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> CredentialsError {
    move |error| CredentialsError::Content { path: path.to_owned(), what: error.to_string() }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let bytes = read(path)?;
    let all = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>().map_err(content(path))?;
    if all.is_empty() { Err(content(path)("there is no certificate in PEM")) } else { Ok(all) }
}

fn bearer(path: &Path) -> Result<HeaderValue, CredentialsError> {
    let bytes = read(path)?;
    let token = bytes.trim_ascii();
    let header = HeaderValue::from_bytes(&[b"Bearer ", token].concat());
    match header {
        Ok(mut header) if !token.is_empty() => {
            header.set_sensitive(true);
            Ok(header)
        }
        _ => Err(content(path)("this is no token")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_host_and_port() {
        for (text, host, port) in [
            ("https://192.168.0.10:6443", "192.168.0.10", 6443),
            ("https://api.example.com/", "api.example.com", 443),
            ("https://[2001:db8::1]:6443", "2001:db8::1", 6443),
            ("https://[2001:db8::1]", "2001:db8::1", 443),
        ] {
            let server = Server::try_from(text.to_owned()).unwrap();
            assert_eq!((server.host.as_str(), server.port), (host, port));
            assert_eq!(Server::try_from(String::from(server.clone())).unwrap(), server);
        }
        for wrong in [
            "",
            "https://",
            "http://a:1",
            "a:1",
            "https://a:0",
            "https://a:x",
            "https://a/b",
            "https://a b",
            "https://a:65536",
        ] {
            assert!(Server::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_pod_knows_its_server() {
        let get = |name: &str| match name {
            "KUBERNETES_SERVICE_HOST" => Some("fd00::1".to_owned()),
            "KUBERNETES_SERVICE_PORT" => Some("443".to_owned()),
            _ => None,
        };
        assert_eq!(Server::of_pod(get).unwrap().authority(), "[fd00::1]:443");
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
        assert!(matches!(bearer(&path), Err(CredentialsError::File { .. })));
        for (text, expected) in
            [("one\n", Some("Bearer one")), ("two", Some("Bearer two")), ("\n", None), ("a\nb", None)]
        {
            std::fs::write(&path, text).unwrap();
            let header = bearer(&path).ok();
            assert_eq!(header.as_ref().map(|it| it.to_str().unwrap()), expected);
        }
        std::fs::write(&path, "no certificate").unwrap();
        let said = certificates(&path).unwrap_err().to_string();
        assert!(said.contains("token: there is no certificate"), "{said}");
    }
}
