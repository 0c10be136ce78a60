//! A small etcd client for routers. It uses etcd's JSON gateway over HTTP or HTTPS, with one
//! connection per call.
//!
//! With users, a call needs a *token*, which a member gives for a password. etcd forgets it after
//! minutes, when a member restarts, or when rights change. So a call that is refused with a token of
//! an earlier call is made once more, with a new one:
//!
//! ```text
//! no token ──authenticate──► fresh ──a call──► remembered ──a call is refused──► no token
//! ```

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::rustls;
use tokio_rustls::rustls::ClientConfig;

use crate::blocking_pool::elsewhere;
use crate::config::{self, Endpoint};
use crate::external::{self, FileError};
use crate::lines::{LineError, Lines};
use crate::lock::lock;

/// The time after which an etcd that has not answered is taken to be down.
const LIMIT: Duration = Duration::from_secs(3);
/// The time after which a watch without a complete message is taken to be dead. etcd sends progress
/// notifications more often.
const QUIET: Duration = Duration::from_secs(30);
/// The largest message of a watch, in bytes.
const LONGEST: usize = 16 << 20;
/// The largest answer, in bytes. It has room for some 200,000 containers.
const ANSWER: usize = 64 << 20;
/// The number of bytes that are read of an error message.
const REFUSAL: usize = 16 << 10;

/// A member of an etcd cluster.
#[derive(Clone, Debug)]
pub(crate) struct Etcd {
    endpoint: Endpoint,
    access: Arc<Access>,
}

/// How this router is known to all members.
#[derive(Debug)]
pub(crate) struct Access {
    settings: config::Etcd,
    /// The token of an earlier call.
    token: Mutex<Option<HeaderValue>>,
}

/// The reason for which there is no answer.
#[derive(Debug, Error)]
pub(crate) enum EtcdError {
    /// etcd cannot be reached, or has closed the connection.
    #[error("{0}")]
    Io(std::io::Error),
    /// There is no TLS with it.
    #[error("{0}")]
    Tls(rustls::Error),
    /// A file of the configuration cannot be used.
    #[error("{0}")]
    File(#[from] FileError),
    /// The other side does not speak HTTP.
    #[error("{0}")]
    Http(#[from] hyper::Error),
    /// etcd did not answer in time.
    #[error("it does not answer")]
    Late,
    /// etcd refused the request.
    #[error("{0}")]
    Refused(String),
    /// The answer is longer than the entries of all routers together could be.
    #[error(
        "it answers with more than {0} bytes: only routers should write below the prefix of the configuration; see what is there with `etcdctl get --prefix --keys-only`, and delete it or choose another prefix"
    )]
    Long(usize),
    /// The answer is not one of etcd's.
    #[error("this is no answer of etcd's: {0}")]
    Malformed(#[from] serde_json::Error),
    /// etcd has ended the watch, because it no longer has the revisions.
    #[error("it has ended the watch: {0}")]
    Ended(String),
}

impl EtcdError {
    /// Returns advice for the reader.
    pub(crate) fn advice(&self) -> &'static str {
        match self {
            EtcdError::Io(_) | EtcdError::Late | EtcdError::Http(_) | EtcdError::Ended(_) => {
                "check endpoints in [etcd], the firewall and etcd itself; what was seen last applies meanwhile"
            }
            EtcdError::Tls(rustls::Error::InvalidCertificate(_)) => {
                "ca has to be the certificate that signs etcd's, which has to name this address"
            }
            EtcdError::Tls(_) => {
                "check that etcd serves TLS there, and that it accepts certificate in [etcd]"
            }
            EtcdError::File(_) => "put the file there, readable by the router",
            // An etcd that checks certificates of clients refuses users of its HTTP gateway whose
            // certificate has one: they could be taken for that name.
            EtcdError::Refused(reason) if reason.contains("CommonName") => {
                "let certificate in [etcd] have a subject without a CommonName, as /O=shunt"
            }
            EtcdError::Refused(_) => {
                "let the user of [etcd] read and write below the prefix, and check the password"
            }
            EtcdError::Long(_) | EtcdError::Malformed(_) => "check that an etcd of 3.4 or later is there",
        }
    }
}

impl From<std::io::Error> for EtcdError {
    fn from(error: std::io::Error) -> EtcdError {
        external::tls_error(error).map_or_else(EtcdError::Io, EtcdError::Tls)
    }
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Stored {
    #[serde(deserialize_with = "text")]
    pub(crate) key: String,
    /// Empty if the key was deleted.
    #[serde(default, deserialize_with = "text")]
    pub(crate) value: String,
}

/// All keys with a prefix, at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) revision: i64,
    pub(crate) stored: Vec<Stored>,
}

/// A stream of changes.
#[derive(Debug)]
pub(crate) struct Watch(Lines);

impl Access {
    pub(crate) fn new(settings: &config::Etcd) -> Arc<Access> {
        Arc::new(Access { settings: settings.clone(), token: Mutex::default() })
    }
}

impl Etcd {
    pub(crate) fn new(endpoint: &Endpoint, access: &Arc<Access>) -> Etcd {
        Etcd { endpoint: endpoint.clone(), access: access.clone() }
    }

    /// Grants a lease of so many seconds, and returns its id.
    pub(crate) async fn grant(&self, seconds: u64) -> Result<i64, EtcdError> {
        #[derive(Deserialize)]
        struct Granted {
            #[serde(rename = "ID", deserialize_with = "number")]
            id: i64,
        }
        self.ask::<Granted>("/v3/lease/grant", json!({ "TTL": seconds })).await.map(|granted| granted.id)
    }

    /// Renews a lease. Returns `false` if it has ended, and its keys with it.
    pub(crate) async fn keep_alive(&self, lease: i64) -> Result<bool, EtcdError> {
        #[derive(Deserialize)]
        struct Kept {
            result: Left,
        }
        #[derive(Deserialize)]
        struct Left {
            #[serde(rename = "TTL", default, deserialize_with = "number")]
            seconds: i64,
        }
        let kept: Kept = self.ask("/v3/lease/keepalive", json!({ "ID": lease })).await?;
        Ok(kept.result.seconds > 0)
    }

    /// Revokes a lease, and so deletes its keys.
    pub(crate) async fn revoke(&self, lease: i64) -> Result<(), EtcdError> {
        self.ask::<Value>("/v3/lease/revoke", json!({ "ID": lease })).await.map(drop)
    }

    pub(crate) async fn put(&self, key: &str, value: &str, lease: i64) -> Result<(), EtcdError> {
        let put = json!({ "key": encoded(key), "value": encoded(value), "lease": lease });
        self.ask::<Value>("/v3/kv/put", put).await.map(drop)
    }

    /// Deletes a key if it has that value.
    pub(crate) async fn delete(&self, key: &str, value: &str) -> Result<(), EtcdError> {
        let key = encoded(key);
        let compare = json!([{ "key": key, "target": "VALUE", "value": encoded(value) }]);
        let success = json!([{ "request_delete_range": { "key": key } }]);
        self.ask::<Value>("/v3/kv/txn", json!({ "compare": compare, "success": success })).await.map(drop)
    }

    /// Returns all keys that begin with `prefix`.
    pub(crate) async fn range(&self, prefix: &str) -> Result<Snapshot, EtcdError> {
        #[derive(Deserialize)]
        struct Ranged {
            header: Header,
            #[serde(default)]
            kvs: Vec<Stored>,
        }
        let range = json!({ "key": encoded(prefix), "range_end": BASE64_STANDARD.encode(end_of(prefix)) });
        let Ranged { header, kvs } = self.ask("/v3/kv/range", range).await?;
        Ok(Snapshot { revision: header.revision, stored: kvs })
    }

    /// Watches these keys for changes after a revision.
    pub(crate) async fn watch(&self, prefix: &str, after: i64) -> Result<Watch, EtcdError> {
        let create = json!({
            "key": encoded(prefix),
            "range_end": BASE64_STANDARD.encode(end_of(prefix)),
            "start_revision": after + 1,
            "progress_notify": true,
        });
        let body = self.send("/v3/watch", json!({ "create_request": create })).await?.into_body();
        Ok(Watch(Lines::new(body, LONGEST)))
    }

    async fn ask<T: for<'de> Deserialize<'de>>(&self, path: &str, question: Value) -> Result<T, EtcdError> {
        let asked = async {
            let body = collect(self.send(path, question).await?, ANSWER).await?;
            Ok(serde_json::from_slice(&body)?)
        };
        timeout(LIMIT, asked).await.unwrap_or(Err(EtcdError::Late))
    }

    /// Asks with a token, if this router is a user.
    async fn send(&self, path: &str, question: Value) -> Result<Response<Incoming>, EtcdError> {
        let question = Bytes::from(question.to_string());
        let remembered = lock(&self.access.token).clone();
        if let Some(token) = remembered {
            match self.send_with(path, question.clone(), Some(&token)).await {
                Err(EtcdError::Refused(_)) => *lock(&self.access.token) = None,
                answer => return answer,
            }
        }
        let token = self.authenticate().await?;
        self.send_with(path, question, token.as_ref()).await
    }

    /// Gets a new token, and remembers it. Returns `None` if this router is no user.
    async fn authenticate(&self) -> Result<Option<HeaderValue>, EtcdError> {
        #[derive(Deserialize)]
        struct Authenticated {
            token: String,
        }
        let config::Etcd { user: Some(user), password: Some(path), .. } = &self.access.settings else {
            return Ok(None);
        };
        let path = path.clone();
        let password = elsewhere(move || password(&path)).await?;
        let question = json!({ "name": user, "password": password }).to_string();
        let answer = self.send_with("/v3/auth/authenticate", question.into(), None).await?;
        let body = timeout(LIMIT, collect(answer, REFUSAL)).await.map_err(|_| EtcdError::Late)??;
        let Authenticated { token } = serde_json::from_slice(&body)?;
        let mut value = HeaderValue::try_from(token)
            .map_err(|error| EtcdError::Malformed(serde::de::Error::custom(error)))?;
        value.set_sensitive(true);
        *lock(&self.access.token) = Some(value.clone());
        Ok(Some(value))
    }

    async fn send_with(
        &self,
        path: &str,
        question: Bytes,
        token: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, EtcdError> {
        let Endpoint { server, is_secure } = &self.endpoint;
        let mut request =
            Request::post(path).header(HOST, server.authority()).header(CONTENT_TYPE, "application/json");
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request.body(Full::new(question)).expect("the parts are fit for a request");
        let sent = async {
            if !is_secure {
                return post(server.connect().await?, request).await;
            }
            let tls = self.tls().await?;
            post(server.secure(server.connect().await?, tls).await?, request).await
        };
        let answer = timeout(LIMIT, sent).await.unwrap_or(Err(EtcdError::Late))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let said = match timeout(LIMIT, collect(answer, REFUSAL)).await.map_err(|_| EtcdError::Late)? {
            Ok(body) => String::from_utf8_lossy(&body).trim().to_owned(),
            Err(EtcdError::Long(limit)) => format!("a reason of more than {limit} bytes"),
            Err(error) => return Err(error),
        };
        Err(EtcdError::Refused(format!("{status}: {said}")))
    }

    async fn tls(&self) -> Result<Arc<ClientConfig>, EtcdError> {
        let access = self.access.clone();
        let read = move || {
            let config::Etcd { ca, certificate, private_key, .. } = &access.settings;
            external::client(ca.as_deref(), certificate.as_deref().zip(private_key.as_deref()))
        };
        Ok(elsewhere(read).await?)
    }
}

/// Sends one request over a connection.
async fn post(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, EtcdError> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the body of the one answer on this connection.
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

/// Reads a password, without the white space around it.
fn password(path: &Path) -> Result<String, FileError> {
    let bytes = external::read(path)?;
    let text = std::str::from_utf8(bytes.trim_ascii()).map_err(FileError::content(path))?;
    match text.is_empty() {
        true => Err(FileError::content(path)("this is no password")),
        false => Ok(text.to_owned()),
    }
}

/// Collects an answer of at most `limit` bytes. A process that answers in place of etcd must not be
/// able to exhaust this host's memory.
async fn collect(answer: Response<Incoming>, limit: usize) -> Result<Bytes, EtcdError> {
    match Limited::new(answer.into_body(), limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(EtcdError::Long(limit)),
        Err(error) => Err(match error.downcast::<hyper::Error>() {
            Ok(error) => EtcdError::Http(*error),
            Err(error) => EtcdError::Io(std::io::Error::other(error)),
        }),
    }
}

impl Watch {
    /// Waits for the next changes, in order. Returns none for a progress notification. A message
    /// that is not complete within [`QUIET`] ends the watch, however slowly it arrives.
    pub(crate) async fn next(&mut self) -> Result<Vec<Stored>, EtcdError> {
        #[derive(Deserialize)]
        struct Line {
            result: Option<Changed>,
            error: Option<Value>,
        }
        #[derive(Deserialize)]
        struct Changed {
            #[serde(default)]
            canceled: bool,
            #[serde(default)]
            cancel_reason: String,
            #[serde(default)]
            events: Vec<Event>,
        }
        #[derive(Deserialize)]
        struct Event {
            kv: Stored,
        }
        let line: Line =
            serde_json::from_slice(&timeout(QUIET, self.0.next()).await.map_err(|_| EtcdError::Late)??)?;
        match line {
            Line { result: Some(Changed { canceled: false, events, .. }), error: None } => {
                Ok(events.into_iter().map(|event| event.kv).collect())
            }
            Line { result, error } => {
                let why = result.map(|result| result.cancel_reason).unwrap_or_default();
                Err(EtcdError::Ended(error.map_or(why, |error| error.to_string())))
            }
        }
    }
}

impl From<LineError> for EtcdError {
    fn from(error: LineError) -> EtcdError {
        match error {
            LineError::Http(error) => EtcdError::Http(error),
            LineError::Long(limit) => EtcdError::Long(limit),
            LineError::Ended | LineError::Cut => EtcdError::Io(std::io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[derive(Deserialize)]
struct Header {
    #[serde(deserialize_with = "number")]
    revision: i64,
}

fn encoded(text: &str) -> String {
    BASE64_STANDARD.encode(text)
}

/// Returns the end of the range: the first key that is larger than all that begin with `prefix`.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // No byte of UTF-8 text is 255, so this cannot overflow.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// Decodes a text. The gateway writes bytes in base 64.
fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    use serde::de::Error;
    let bytes = BASE64_STANDARD.decode(String::deserialize(deserializer)?).map_err(D::Error::custom)?;
    String::from_utf8(bytes).map_err(D::Error::custom)
}

/// Parses a number. The gateway writes 64-bit numbers as text.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    use serde::de::Error;
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Starts a server that answers with that status and an endless body without a newline.
    async fn endless(status: &'static str) -> Etcd {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let settings = toml::from_str::<config::Etcd>(&format!("endpoints = ['{endpoint}']")).unwrap();
        let etcd = Etcd::new(&settings.endpoints[0], &Access::new(&settings));
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut question = [0; 4096];
                let _ = stream.read(&mut question).await;
                let head = format!("HTTP/1.1 {status}\r\n\r\n");
                let mut open = stream.write_all(head.as_bytes()).await;
                while open.is_ok() {
                    open = stream.write_all(&[b' '; 1 << 20]).await;
                }
            }
        });
        etcd
    }

    #[tokio::test]
    async fn an_answer_without_an_end_is_given_up() {
        let etcd = endless("200 OK").await;
        let error = etcd.send("/v3/kv/range", json!({})).await.map(|answer| collect(answer, 1 << 20));
        let error = error.unwrap().await.unwrap_err();
        assert!(matches!(error, EtcdError::Long(_)) && error.to_string().contains("prefix"), "{error}");
        let mut watch = etcd.watch("/shunt/", 1).await.unwrap();
        let error = watch.next().await.unwrap_err();
        assert!(matches!(error, EtcdError::Long(LONGEST)), "{error}");
        assert!(watch.0.waiting() <= LONGEST + (1 << 20), "{}", watch.0.waiting());
        let error = endless("503 Service Unavailable").await.range("/shunt/").await.unwrap_err();
        let said = error.to_string();
        assert!(said.starts_with("503") && said.len() < 200, "{said}");
    }
}
