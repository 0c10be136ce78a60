//! Requests to the API server: pages of lists, and watches. Each connection is HTTP/1.1 over TLS 1.3
//! and ends with its watch. Times and sizes of all answers are bounded.

use std::time::Duration;

use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::value::RawValue;
use socket2::{SockRef, TcpKeepalive};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::rustls;

use super::progress::Event;
use super::settings::{CredentialsError, Settings};
use super::typed::{Kind, Known, Meta, Wrong};
use crate::blocking_pool::elsewhere;
use crate::external;
use crate::lines::{LineError, Lines};

/// How long answers may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// For a connection, and for the head of an answer.
    head: Duration,
    page: Duration,
    watch: Duration,
}

const LIMITS: Limits = Limits {
    head: Duration::from_secs(10),
    page: Duration::from_secs(60),
    watch: WATCH.saturating_add(GRACE),
};
/// The number of objects that a page should have.
const PAGE: usize = 500;
/// The largest page. An object has at most 1.5 MiB in etcd.
const PAGE_SIZE: usize = 64 << 20;
/// The largest event of a watch.
const EVENT: usize = 8 << 20;
/// How long the server should let a watch last, and how much longer this side waits for its end.
const WATCH: Duration = Duration::from_secs(300);
const GRACE: Duration = Duration::from_secs(30);
/// The shortest time that a watch without an event lasts.
const SHORTEST: Duration = Duration::from_secs(1);
/// The number of bytes that are read of a refusal.
const REFUSAL: usize = 16 << 10;

/// The reason for which there is no usable answer.
#[derive(Debug, Error)]
pub(super) enum ApiError {
    #[error("{0}")]
    Credentials(#[from] CredentialsError),
    #[error("{0}")]
    Io(std::io::Error),
    #[error("{0}")]
    Tls(rustls::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("it does not answer")]
    Late,
    #[error("it answers {status}: {message}")]
    Refused { status: StatusCode, message: String },
    #[error("it no longer has that version: {0}")]
    Expired(String),
    #[error("its answer is too long: {0}")]
    Long(String),
    #[error("its answer is not understood: {0}")]
    Garbled(String),
    #[error("it has closed the connection")]
    Closed,
}

impl ApiError {
    pub(super) fn event(&self) -> Event {
        match self {
            ApiError::Expired(_) => Event::Expired,
            ApiError::Garbled(_) | ApiError::Long(_) => Event::Garbled,
            ApiError::Closed => Event::Ended,
            _ => Event::Failed,
        }
    }

    /// Returns advice for the reader. Empty if the router needs no help.
    pub(super) fn advice(&self) -> &'static str {
        match self {
            ApiError::Credentials(CredentialsError::NoServer) => {
                "set server, ca and token in [kubernetes], or run the router in a pod"
            }
            ApiError::Credentials(_) => "put the file there, readable by the router",
            ApiError::Io(_) | ApiError::Late | ApiError::Http(_) => {
                "check the address, the firewall and the API server; what was seen last applies meanwhile"
            }
            ApiError::Tls(rustls::Error::InvalidCertificate(_)) => {
                "ca has to be the certificate that signs the API server's, which has to name this address"
            }
            ApiError::Tls(_) => {
                "check that an API server is at this address, and that it accepts the certificate"
            }
            ApiError::Refused { status, .. } => match *status {
                StatusCode::UNAUTHORIZED => "the token or certificate is not accepted: renew it",
                StatusCode::FORBIDDEN => {
                    "let the account get, list and watch pods, namespaces and networkpolicies: packaging/kubernetes/rbac.yaml"
                }
                _ => "look into the API server's log; what was seen last applies meanwhile",
            },
            ApiError::Long(_) | ApiError::Garbled(_) => "check that an API server is at this address",
            ApiError::Expired(_) | ApiError::Closed => "",
        }
    }
}

impl From<std::io::Error> for ApiError {
    fn from(error: std::io::Error) -> ApiError {
        external::tls_error(error).map_or_else(ApiError::Io, ApiError::Tls)
    }
}

impl From<Wrong> for ApiError {
    fn from(Wrong(what): Wrong) -> ApiError {
        ApiError::Garbled(what)
    }
}

impl From<serde_json::Error> for ApiError {
    fn from(error: serde_json::Error) -> ApiError {
        ApiError::Garbled(error.to_string())
    }
}

/// A connection.
pub(super) struct Session {
    sender: SendRequest<Empty<Bytes>>,
    authority: String,
    bearer: Option<HeaderValue>,
    limits: Limits,
}

/// A page of a list.
pub(super) struct Page<K> {
    pub(super) version: String,
    pub(super) next: Option<String>,
    pub(super) objects: Vec<Known<K>>,
}

/// An event of a watch.
pub(super) enum Change<K> {
    Put(Known<K>),
    Delete(Known<K>),
    Bookmark(String),
}

impl Session {
    /// Connects, with the credentials as the files have them now.
    pub(super) async fn open(settings: &Settings) -> Result<Session, ApiError> {
        let settings = settings.clone();
        let credentials = elsewhere(move || settings.credentials()).await?;
        let connect = async {
            let stream = credentials.server.connect().await?;
            let keepalive = TcpKeepalive::new()
                .with_time(Duration::from_secs(15))
                .with_interval(Duration::from_secs(5))
                .with_retries(3);
            SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
            Ok::<_, ApiError>(credentials.server.secure(stream, credentials.tls.clone()).await?)
        };
        let stream = timeout(LIMITS.head, connect).await.unwrap_or(Err(ApiError::Late))?;
        Session::over(stream, credentials.server.authority(), credentials.bearer.clone(), LIMITS).await
    }

    /// Speaks HTTP over a stream.
    async fn over(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        authority: String,
        bearer: Option<HeaderValue>,
        limits: Limits,
    ) -> Result<Session, ApiError> {
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // The task ends with the connection, which this value and its answers keep.
        tokio::spawn(connection);
        Ok(Session { sender, authority, bearer, limits })
    }

    /// Returns `false` if the server has closed the connection.
    pub(super) fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    /// Asks for a page. `within` is a selector of fields, or empty.
    pub(super) async fn page<K: Kind>(
        &mut self,
        within: &str,
        token: Option<&str>,
    ) -> Result<Page<K>, ApiError> {
        let mut query = format!("{}?limit={PAGE}", K::PATH);
        for (key, value) in [("fieldSelector", Some(within)), ("continue", token)] {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                query += &format!("&{key}={}", encoded(value));
            }
        }
        let limits = self.limits;
        let asked = async {
            let answer = self.get(&query).await?;
            let body = collect(answer, PAGE_SIZE).await?;
            elsewhere(move || parse_page(&body)).await
        };
        timeout(limits.page, asked).await.unwrap_or(Err(ApiError::Late))
    }

    /// Watches for changes after a version. The connection is the watch's from now on.
    pub(super) async fn watch(mut self, path: &str, after: &str) -> Result<Watch, ApiError> {
        let query = format!(
            "{path}?watch=true&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={}",
            WATCH.as_secs(),
            encoded(after)
        );
        let lines = Lines::new(self.get(&query).await?.into_body(), EVENT);
        let began = Instant::now();
        Ok(Watch { lines, began, until: began + self.limits.watch, has_events: false })
    }

    async fn get(&mut self, query: &str) -> Result<Response<Incoming>, ApiError> {
        let mut request = Request::get(query)
            .header(HOST, &self.authority)
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, concat!("shunt/", env!("CARGO_PKG_VERSION")));
        if let Some(bearer) = &self.bearer {
            request = request.header(AUTHORIZATION, bearer);
        }
        let request = request.body(Empty::new()).map_err(|error| ApiError::Garbled(error.to_string()))?;
        let sent = async {
            self.sender.ready().await?;
            self.sender.send_request(request).await
        };
        let answer = timeout(self.limits.head, sent).await.map_err(|_| ApiError::Late)??;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let body = timeout(self.limits.head, collect(answer, REFUSAL)).await.map_err(|_| ApiError::Late)?;
        let message = body.map(|body| message(&body)).unwrap_or_else(|error| error.to_string());
        Err(refusal(status, message))
    }
}

/// A watch.
pub(super) struct Watch {
    lines: Lines,
    began: Instant,
    until: Instant,
    has_events: bool,
}

impl Watch {
    /// Waits for the next event.
    pub(super) async fn next<K: Kind>(&mut self) -> Result<Change<K>, ApiError> {
        let line = timeout_at(self.until, self.lines.next()).await.map_err(|_| ApiError::Late)?;
        let line = line.map_err(|error| match error {
            LineError::Http(error) => ApiError::Http(error),
            LineError::Long(_) => ApiError::Long(error.to_string()),
            // No server ends a watch so soon. Changes could be missed for ever.
            LineError::Ended if !self.has_events && self.began.elapsed() < SHORTEST => {
                ApiError::Garbled("it ends watches without an event".into())
            }
            LineError::Ended => ApiError::Closed,
            LineError::Cut => ApiError::Garbled(error.to_string()),
        })?;
        self.has_events = true;
        parse_event(&line)
    }
}

fn parse_page<K: Kind>(body: &[u8]) -> Result<Page<K>, ApiError> {
    #[derive(Deserialize)]
    struct List<'a> {
        metadata: ListMeta,
        #[serde(borrow)]
        items: Option<Vec<&'a RawValue>>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct ListMeta {
        resource_version: String,
        #[serde(default, rename = "continue")]
        next: String,
    }
    let List { metadata, items } = serde_json::from_slice(body)?;
    let objects = items.unwrap_or_default().into_iter().map(|it| K::read(it.get()));
    let objects = objects.collect::<Result<Vec<_>, Wrong>>()?;
    if metadata.resource_version.is_empty() {
        return Err(ApiError::Garbled("the list has no resourceVersion".into()));
    }
    let next = Some(metadata.next).filter(|next| !next.is_empty());
    Ok(Page { version: metadata.resource_version, next, objects })
}

fn parse_event<K: Kind>(line: &[u8]) -> Result<Change<K>, ApiError> {
    #[derive(Deserialize)]
    struct Line<'a> {
        r#type: String,
        #[serde(borrow)]
        object: &'a RawValue,
    }
    #[derive(Deserialize)]
    struct Bookmark {
        metadata: Meta,
    }
    let Line { r#type, object } = serde_json::from_slice(line)?;
    match r#type.as_str() {
        "ADDED" | "MODIFIED" => Ok(Change::Put(K::read(object.get())?)),
        "DELETED" => Ok(Change::Delete(K::read(object.get())?)),
        "BOOKMARK" => {
            let Bookmark { metadata } = serde_json::from_str(object.get())?;
            Ok(Change::Bookmark(metadata.version()?))
        }
        "ERROR" => {
            let Status { code, message } = serde_json::from_str(object.get())?;
            let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            Err(refusal(status, message))
        }
        other => Err(ApiError::Garbled(format!("there is no event {other:?}"))),
    }
}

/// The API's Status.
#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

fn message(body: &[u8]) -> String {
    let status = serde_json::from_slice::<Status>(body).map(|status| status.message);
    let text = status.unwrap_or_else(|_| String::from_utf8_lossy(body).into_owned());
    text.chars().filter(|it| !it.is_control()).take(300).collect()
}

fn refusal(status: StatusCode, message: String) -> ApiError {
    match status {
        StatusCode::GONE => ApiError::Expired(message),
        status => ApiError::Refused { status, message },
    }
}

async fn collect(answer: Response<Incoming>, limit: usize) -> Result<Bytes, ApiError> {
    match Limited::new(answer.into_body(), limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(ApiError::Long(format!("it has more than {limit} bytes")))
        }
        Err(error) => Err(match error.downcast::<hyper::Error>() {
            Ok(error) => ApiError::Http(*error),
            Err(error) => ApiError::Io(std::io::Error::other(error)),
        }),
    }
}

/// Encodes a value of a query.
fn encoded(value: &str) -> String {
    let mut text = String::new();
    for byte in value.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => text.push(byte as char),
            other => text += &format!("%{other:02X}"),
        }
    }
    text
}

#[cfg(test)]
#[path = "api_tests.rs"]
mod tests;
