//! workerd, one of the programs on Cap'n Proto's KJ. It registers a duplicate of each socket in its
//! epoll instance.

use shunt_compat::{Host, Program, both, node_package};
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
const CLIENTS: usize = 8;

fn workerd(host: &Host, program: &Path, port: u16) -> Program {
    host.write("page.js", include_str!("../programs/page_workerd.js"));
    let config = host.write(
        "config.capnp",
        format!(
            "using Workerd = import \"/workerd/workerd.capnp\";\n\
             const config :Workerd.Config = (\n\
             services = [(name = \"main\", worker = .page)],\n\
             sockets = [(name = \"http\", address = \"127.0.0.1:{port}\", http = (), service = \"main\")]);\n\
             const page :Workerd.Worker = (\n\
             modules = [(name = \"page\", esModule = embed \"page.js\")], compatibilityDate = \"2025-01-01\");\n"
        ),
    );
    let server = host.program(program.to_str().expect("plain")).arg("serve").arg(config).start("workerd");
    host.wait_for_port(port);
    server
}

#[test]
fn a_worker_answers_clients_under_shunt() {
    // Hosts have no network, so fetch it before.
    let program = node_package("@cloudflare/workerd-linux-64", "1.20261117.1").join("bin/workerd");
    both(LIMIT, move |host| {
        let port = host.port();
        let server = workerd(host, &program, port);
        let client = host
            .script("python3", "pages.py")
            .args([&port.to_string(), "/", &CLIENTS.to_string(), "40"])
            .arg(host.write("gate", ""))
            .run("pages", LIMIT);
        drop(server);
        assert!(client.success(), "{}", client.stderr);
        client.stdout
    });
}
