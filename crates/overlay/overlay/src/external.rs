//! Servers that are no routers, such as the API server and etcd: their addresses, and the files with
//! which a router connects to them by TLS. The files are read for each connection, since they are
//! replaced while the router runs.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

/// The largest file with credentials.
const LARGEST: u64 = 1 << 20;

/// Host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Server {
    /// Parses HOST:PORT, or HOST if there is a default for the port.
    pub(crate) fn parse(place: &str, default_port: Option<u16>) -> Option<Server> {
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !host.ends_with(':') && !port.contains(']') => (host, port.parse().ok()?),
            _ => (place, default_port?),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_sound = port != 0 && ServerName::try_from(host).is_ok();
        is_sound.then(|| Server { host: host.to_owned(), port })
    }

    /// Returns host and port as a URL has them.
    pub(crate) fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    pub(crate) async fn connect(&self) -> io::Result<TcpStream> {
        TcpStream::connect((self.host.as_str(), self.port)).await
    }

    /// Makes a connection one of TLS. The server's certificate must name its host.
    pub(crate) async fn secure(
        &self,
        stream: TcpStream,
        tls: Arc<ClientConfig>,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Unpin + Send + 'static> {
        let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
        TlsConnector::from(tls).connect(name, stream).await
    }
}

/// The reason for which there are no credentials.
#[derive(Debug, Error)]
pub(crate) enum FileError {
    #[error("{}: {source}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: {what}", .path.display())]
    Content { path: PathBuf, what: String },
}

impl FileError {
    pub(crate) fn content<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> FileError {
        move |error| FileError::Content { path: path.to_owned(), what: error.to_string() }
    }
}

/// Returns the error of TLS that an error of a connection stands for, or else the latter.
pub(crate) fn tls_error(error: io::Error) -> Result<rustls::Error, io::Error> {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(tls) => Ok(tls.clone()),
        None => Err(error),
    }
}

/// Returns what TLS to a server needs: the certificates of which one has signed the server's, and
/// the certificate and key by which the server knows this router. Without `ca`, no server is trusted.
pub(crate) fn client(ca: Option<&Path>, own: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>, FileError> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = ca {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(FileError::content(path))?;
        }
    }
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder = builder.expect("the provider has TLS 1.3").with_root_certificates(roots);
    let mut tls = match own {
        Some((certificate, key)) => {
            let parsed = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(FileError::content(key))?;
            builder
                .with_client_auth_cert(certificates(certificate)?, parsed)
                .map_err(FileError::content(certificate))?
        }
        None => builder.with_no_client_auth(),
    };
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(tls))
}

/// Reads a file of limited size.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST).read_to_end(&mut bytes));
    read.map(|_| bytes).map_err(|source| FileError::File { path: path.to_owned(), source })
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(aws_lc_rs::default_provider()));
    PROVIDER.clone()
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let bytes = read(path)?;
    let all = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    let all = all.map_err(FileError::content(path))?;
    if all.is_empty() { Err(FileError::content(path)("there is no certificate in PEM")) } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_host_and_port() {
        for (place, host, port) in [
            ("192.168.0.10:6443", "192.168.0.10", 6443),
            ("api.example.com", "api.example.com", 443),
            ("[2001:db8::1]:6443", "2001:db8::1", 6443),
            ("[2001:db8::1]", "2001:db8::1", 443),
        ] {
            let server = Server::parse(place, Some(443)).unwrap();
            assert_eq!((server.host.as_str(), server.port), (host, port));
            assert_eq!(Server::parse(&server.authority(), None), Some(server));
        }
        assert_eq!(Server::parse("api.example.com", None), None);
        for wrong in ["", ":1", "a:0", "a:x", "a/b", "a b", "a:65536"] {
            assert_eq!(Server::parse(wrong, Some(443)), None, "{wrong}");
        }
    }

    #[test]
    fn a_file_without_a_certificate_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca");
        assert!(matches!(client(Some(&path), None), Err(FileError::File { .. })));
        std::fs::write(&path, "no certificate").unwrap();
        let said = client(Some(&path), None).unwrap_err().to_string();
        assert!(said.contains("ca: there is no certificate"), "{said}");
    }
}
