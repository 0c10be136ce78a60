//! Varnish in front of Python's web server: threads with stacks of 80 KiB, a manager that forks its
//! child, and pages from the cache.

use shunt_compat::{Expected, both};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(90);
const CONNECTIONS: usize = 20;

#[test]
fn pages_from_the_cache_and_past_it() {
    both(LIMIT, |host| {
        let (port, behind) = (host.port(), host.port());
        let page: String = (0..20_000).map(|index| char::from(b'a' + (index / 5 % 23) as u8)).collect();
        host.write("page", &page);
        let backend = host
            .program("python3")
            .words(&format!("-m http.server --protocol HTTP/1.1 --bind 127.0.0.1 {behind}"))
            .start("backend");
        host.wait_for_port(behind);
        let vcl = format!(
            "vcl 4.1;\nbackend default {{ .host = \"127.0.0.1\"; .port = \"{behind}\"; }}\n\
             sub vcl_recv {{ if (req.url ~ \"past\") {{ return (pass); }} }}\n"
        );
        let vcl = host.write("test.vcl", vcl);
        let server = host
            .program("varnishd")
            .words(&format!("-F -j none -a 127.0.0.1:{port} -s malloc,64m -n"))
            .arg(host.path("varnish"))
            .arg("-f")
            .arg(vcl)
            .start("varnishd");
        host.wait_for_port(port);
        for query in ["", "?past=1", "?past=2", ""] {
            let fetched = host
                .program("curl")
                .words(&format!("-sS --fail --max-time 20 http://127.0.0.1:{port}/page{query}"))
                .run("curl", LIMIT);
            assert!(fetched.success() && fetched.stdout == page, "{query}: {}", host.logs());
        }
        let transport = host.watch_transport();
        let load = host
            .program("wrk")
            .words(&format!("-t 2 -c {CONNECTIONS} -d 2s --timeout 10s http://127.0.0.1:{port}/page"))
            .run("wrk", LIMIT);
        assert!(load.success() && load.stdout.contains("Requests/sec"), "{}", load.stdout);
        assert!(
            !load.stdout.contains("Socket errors") && !load.stdout.contains("Non-2xx"),
            "{}",
            load.stdout
        );
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
        drop(server);
        drop(backend);
    });
}
