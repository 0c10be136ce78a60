//! Answers of API servers, also hostile ones, over a stream in memory.

use std::fmt::Write as _;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::super::typed::{Namespace, Pod};
use super::*;

/// Returns a session, and the server's end of its stream.
async fn session(bearer: Option<&str>) -> (Session, DuplexStream) {
    limited(bearer, LIMITS).await
}

async fn limited(bearer: Option<&str>, limits: Limits) -> (Session, DuplexStream) {
    let (near, far) = duplex(1 << 16);
    let bearer = bearer.map(|it| HeaderValue::from_str(it).unwrap());
    (Session::over(near, "api:6443".to_owned(), bearer, limits).await.unwrap(), far)
}

/// Reads the head of a request.
async fn request(far: &mut DuplexStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        far.read_exact(&mut byte).await.unwrap();
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

/// Answers a request with these bytes, and then closes or goes on.
async fn answer(far: &mut DuplexStream, status: &str, body: &str) -> String {
    let asked = request(far).await;
    let text = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    // The other side may have read enough of it.
    let _ = far.write_all(text.as_bytes()).await;
    asked
}

fn namespace(name: &str, version: u64) -> Value {
    json!({ "metadata": { "name": name, "uid": name, "resourceVersion": version.to_string() } })
}

fn list(items: &[Value], version: &str, next: Option<&str>) -> String {
    let mut metadata = json!({ "resourceVersion": version });
    if let Some(next) = next {
        metadata["continue"] = json!(next);
        metadata["remainingItemCount"] = json!(1);
    }
    json!({ "kind": "NamespaceList", "apiVersion": "v1", "metadata": metadata, "items": items }).to_string()
}

#[tokio::test]
async fn a_list_has_pages() {
    let (mut session, mut far) = session(Some("Bearer abc")).await;
    let server = tokio::spawn(async move {
        let first = answer(&mut far, "200 OK", &list(&[namespace("a", 1)], "7", Some("t/+="))).await;
        let second = answer(&mut far, "200 OK", &list(&[namespace("b", 2)], "7", None)).await;
        (first, second)
    });
    let page = session.page::<Namespace>("", None).await.unwrap();
    assert_eq!((page.objects.len(), page.next.as_deref(), page.version.as_str()), (1, Some("t/+="), "7"));
    let page = session.page::<Namespace>("spec.nodeName=one", page.next.as_deref()).await.unwrap();
    assert_eq!((page.objects[0].uid.as_str(), page.next), ("b", None));
    let (first, second) = server.await.unwrap();
    assert!(first.starts_with("GET /api/v1/namespaces?limit=500 HTTP/1.1\r\n"), "{first}");
    assert!(
        first.contains("authorization: Bearer abc\r\n") && first.contains("host: api:6443\r\n"),
        "{first}"
    );
    assert!(second.contains("?limit=500&fieldSelector=spec.nodeName%3Done&continue=t%2F%2B%3D "), "{second}");
}

async fn page_of(status: &str, body: &str) -> Result<Page<Namespace>, ApiError> {
    let (mut session, mut far) = session(None).await;
    let (status, body) = (status.to_owned(), body.to_owned());
    let server = tokio::spawn(async move {
        answer(&mut far, &status, &body).await;
        far
    });
    let page = session.page::<Namespace>("", None).await;
    server.await.unwrap();
    page
}

#[tokio::test]
async fn strange_lists_are_refused() {
    let status = |code: u16| {
        json!({ "kind": "Status", "code": code, "message": "no\nsuch", "reason": "r" }).to_string()
    };
    for (answered, body, event, said) in [
        ("200 OK", "{".to_owned(), Event::Garbled, "not understood"),
        ("200 OK", "[]".into(), Event::Garbled, "not understood"),
        ("200 OK", json!({ "metadata": {}, "items": [] }).to_string(), Event::Garbled, "resourceVersion"),
        (
            "200 OK",
            json!({ "metadata": { "resourceVersion": "" }, "items": [] }).to_string(),
            Event::Garbled,
            "resourceVersion",
        ),
        (
            "200 OK",
            json!({ "metadata": { "resourceVersion": 7 }, "items": [] }).to_string(),
            Event::Garbled,
            "string",
        ),
        (
            "200 OK",
            json!({ "metadata": { "resourceVersion": "7" }, "items": {} }).to_string(),
            Event::Garbled,
            "sequence",
        ),
        ("200 OK", list(&[json!({ "metadata": 1 })], "7", None), Event::Garbled, "not understood"),
        ("410 Gone", status(410), Event::Expired, "no longer has"),
        ("401 Unauthorized", status(401), Event::Failed, "401 Unauthorized: nosuch"),
        ("403 Forbidden", "<html>".into(), Event::Failed, "<html>"),
        ("429 Too Many Requests", String::new(), Event::Failed, "429"),
        ("302 Found", String::new(), Event::Failed, "302"),
        ("500 Internal Server Error", "x".repeat(100_000), Event::Failed, "more than 16384 bytes"),
    ] {
        let error = page_of(answered, &body).await.err().expect(answered);
        assert_eq!(error.event(), event, "{error}");
        assert!(error.to_string().contains(said), "{error}");
        assert!(event == Event::Expired || !error.advice().is_empty(), "{error}");
    }
    let empty = json!({ "metadata": { "resourceVersion": "7" }, "items": null }).to_string();
    assert!(page_of("200 OK", &empty).await.unwrap().objects.is_empty());
}

#[tokio::test]
async fn no_answer_and_a_broken_one_are_failures() {
    let (mut session, far) = session(None).await;
    drop(far);
    assert_eq!(session.page::<Namespace>("", None).await.err().unwrap().event(), Event::Failed);
    for broken in [
        "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        "SSH-2.0-x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ] {
        let (mut session, mut far) = crate::kubernetes::api::tests::session(None).await;
        let server = tokio::spawn(async move {
            request(&mut far).await;
            far.write_all(broken.as_bytes()).await.unwrap();
        });
        assert_eq!(
            session.page::<Namespace>("", None).await.err().unwrap().event(),
            Event::Failed,
            "{broken}"
        );
        server.await.unwrap();
    }
}

/// Sends a head, and then a byte now and then until the other side closes.
fn trickle(mut far: DuplexStream, head: &'static str) {
    tokio::spawn(async move {
        request(&mut far).await;
        let mut open = far.write_all(head.as_bytes()).await;
        while open.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
            open = far.write_all(b" ").await;
        }
    });
}

#[tokio::test]
async fn a_silent_or_slow_server_is_given_up() {
    const SHORT: Duration = Duration::from_millis(100);
    let limits = Limits { head: SHORT, page: SHORT, watch: SHORT };
    let (mut silent, _far) = limited(None, limits).await;
    assert!(matches!(silent.page::<Namespace>("", None).await, Err(ApiError::Late)));
    let (mut slow, far) = limited(None, limits).await;
    trickle(far, "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
    assert!(matches!(slow.page::<Namespace>("", None).await, Err(ApiError::Late)));
    let (slow, far) = limited(None, limits).await;
    trickle(far, "HTTP/1.1 200 OK\r\n\r\n");
    let mut watch = slow.watch(Namespace::PATH, "7").await.unwrap();
    assert!(matches!(watch.next::<Namespace>().await, Err(ApiError::Late)));
}

/// Returns a watch with that body, in pieces of `piece` bytes, and the request.
async fn watch(body: String, piece: usize) -> (Watch, tokio::task::JoinHandle<String>) {
    let (session, mut far) = session(None).await;
    let server = tokio::spawn(async move {
        let asked = request(&mut far).await;
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
        let mut text = head.to_owned();
        for chunk in body.as_bytes().chunks(piece) {
            let _ = write!(text, "{:x}\r\n{}\r\n", chunk.len(), std::str::from_utf8(chunk).unwrap());
        }
        text += "0\r\n\r\n";
        let _ = far.write_all(text.as_bytes()).await;
        asked
    });
    (session.watch(Namespace::PATH, "7 8").await.unwrap(), server)
}

fn event(kind: &str, object: &Value) -> String {
    json!({ "type": kind, "object": object }).to_string() + "\n"
}

#[tokio::test]
async fn a_watch_has_events_in_pieces_of_any_size() {
    for piece in [1, 2, 7, 64, 1 << 14] {
        let bookmark = json!({ "kind": "Namespace", "metadata": { "resourceVersion": "12", "creationTimestamp": null } });
        let body = event("ADDED", &namespace("a", 8))
            + &event("MODIFIED", &namespace("a", 9))
            + &event("BOOKMARK", &bookmark)
            + &event("DELETED", &namespace("a", 13));
        let (mut watch, server) = watch(body, piece).await;
        for version in ["8", "9"] {
            let Change::Put(known) = watch.next::<Namespace>().await.unwrap() else { panic!("a change") };
            assert_eq!(known.version, version);
        }
        assert!(matches!(watch.next::<Namespace>().await.unwrap(), Change::Bookmark(it) if it == "12"));
        assert!(matches!(watch.next::<Namespace>().await.unwrap(), Change::Delete(it) if it.uid == "a"));
        assert_eq!(watch.next::<Namespace>().await.err().unwrap().event(), Event::Ended);
        let asked = server.await.unwrap();
        let query = "/api/v1/namespaces?watch=true&allowWatchBookmarks=true&timeoutSeconds=300&resourceVersion=7%208 ";
        assert!(asked.contains(query), "{asked}");
    }
}

#[tokio::test]
async fn strange_events_are_refused() {
    let status = |code: u16| json!({ "kind": "Status", "code": code, "message": "too old resource version" });
    for (body, expected) in [
        (event("ERROR", &status(410)), Event::Expired),
        (event("ERROR", &status(500)), Event::Failed),
        (event("ERROR", &json!({})), Event::Failed),
        (event("ERROR", &json!("gone")), Event::Garbled),
        (event("RENAMED", &namespace("a", 8)), Event::Garbled),
        (event("BOOKMARK", &json!({ "metadata": {} })), Event::Garbled),
        (event("ADDED", &json!({ "metadata": { "name": "a" } })), Event::Garbled),
        (event("ADDED", &json!(null)), Event::Garbled),
        ("{\"type\":\"ADDED\"}\n".to_owned(), Event::Garbled),
        ("\n".to_owned(), Event::Garbled),
        ("not json\n".to_owned(), Event::Garbled),
        // It has ended within an event, or before one.
        ("{\"type\":".to_owned(), Event::Garbled),
        (String::new(), Event::Garbled),
    ] {
        let (mut watch, _) = watch(body.clone(), 5).await;
        let error = watch.next::<Namespace>().await.err().expect(&body);
        assert_eq!(error.event(), expected, "{body} {error}");
    }
}

#[tokio::test]
async fn an_endless_line_is_given_up() {
    let (session, mut far) = session(None).await;
    tokio::spawn(async move {
        request(&mut far).await;
        let mut open = far.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
        while open.is_ok() {
            open = far.write_all(&[b' '; 1 << 16]).await;
        }
    });
    let mut watch = session.watch(Pod::PATH, "1").await.unwrap();
    let error = watch.next::<Pod>().await.err().unwrap();
    assert!(matches!(error, ApiError::Long(_)) && error.event() == Event::Garbled, "{error}");
    assert!(watch.lines.waiting() <= EVENT + (1 << 20), "{}", watch.lines.waiting());
}

/// `pods.json` is an answer of kube-apiserver 1.33.4, as `overlay_apiserver` in the command's tests
/// receives it.
#[test]
fn a_real_list_is_understood() {
    let page = parse_page::<Pod>(include_bytes!("pods.json")).unwrap();
    assert_eq!((page.version.as_str(), page.next), ("219", None));
    let pods = page.objects.into_iter().map(|it| (it.node.unwrap(), it.version, it.object.unwrap()));
    let listed: Vec<String> = pods
        .map(|(node, version, pod)| {
            format!(
                "{node} {version} {} {:?} {:?} {:?}",
                pod.name,
                pod.addresses,
                pod.host.unwrap(),
                pod.ports
            )
        })
        .collect();
    assert_eq!(
        listed,
        [
            "b 211 db {10.50.2.2} 192.168.77.2 {\"sql\": {9000}}",
            "a 209 web {10.50.1.2} 192.168.77.1 {\"sql\": {9000}}",
        ]
    );
}
