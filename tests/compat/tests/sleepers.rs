//! Threads asleep in every kind of call while other threads use their connections, which come, switch and go all the time:
//! everybody is woken, and every byte is right.

use shunt_compat::{Host, both};
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
/// The longer variant: `mingle serve PORT` and `mingle load PORT 600`, both under shunt.
const SECONDS: &str = "6";

fn build(host: &Host) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/mingle.c");
    let program = host.path("mingle");
    host.program("gcc").native().args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).run("gcc", LIMIT);
    program.to_string_lossy().into_owned()
}

#[test]
fn everybody_is_woken() {
    both(LIMIT, |host| {
        let program = build(host);
        let port = host.port();
        let _server = host.program(&program).args(["serve", &port.to_string()]).start("server");
        host.wait_for_port(port);
        let road = host.watch_road();
        // On a busy machine the broker may not be heard for a while.
        for _ in 0..4 {
            let load = host.program(&program).args(["load", &port.to_string(), SECONDS]).start("load");
            let ended = load.wait(LIMIT);
            assert!(ended.success(), "{}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
            assert_eq!(ended.stdout, "every byte was right\n");
            if !road.is_watched() || road.on_shm(port) > 0 {
                return;
            }
        }
        panic!("{}", road.report(port));
    });
}
