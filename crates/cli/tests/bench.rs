//! Tests of `shunt bench`: it measures what it names, over the transports that it names. The tests
//! do not check the results' size.

mod common;

use common::*;
use serde_json::Value;

fn bench(arguments: &[&str]) -> Value {
    let shell = Shell::new();
    let mut command = shell.shunt(["bench", "local", "--json", "--repeats", "1", "--seconds", "0.05"]);
    command.args(arguments);
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

fn cells(report: &Value) -> Vec<(&Value, &Value)> {
    let tables = report["tables"].as_array().unwrap().iter();
    let lines = tables.flat_map(|table| table["lines"].as_array().unwrap());
    lines.flat_map(|line| line["cells"].as_array().unwrap().iter().map(move |cell| (line, cell))).collect()
}

#[test]
fn our_own_loads_are_on_the_transports_that_they_are_measured_on() {
    // Each turn starts its programs anew, which takes longer than it measures.
    let report = bench(&["round-trip", "crowd", "--sides", "tcp-nodelay,unix,shunt"]);
    let cells = cells(&report);
    assert!(cells.len() >= 2 * (9 + 3 * 3 + 1), "{} cells", cells.len());
    for (line, cell) in cells {
        assert!(cell["figure"]["median"].as_f64().unwrap() > 0.0, "{line}");
        let side = cell["side"].as_str().unwrap();
        let expected = side.starts_with("shunt");
        assert_eq!(!cell["on_shm"].is_null(), expected, "{cell}");
        if expected {
            assert_eq!(cell["on_shm"][0], cell["on_shm"][1], "not all on shared memory: {line}");
            assert!(cell["on_shm"][1].as_u64().unwrap() > 0, "nobody was seen: {line}");
        }
    }
}

/// redis-benchmark makes a fixed number of requests and may end early. Its connections must be
/// counted anyway.
#[test]
fn a_load_that_ends_early_is_known_to_have_been_on_shared_memory() {
    let shell = Shell::new();
    let command = shell.shunt(["bench", "local", "redis", "--json", "--repeats", "1", "--seconds", "0.2"]);
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let under_shunt = |cell: &&Value| cell["side"].as_str().unwrap().starts_with("shunt");
    let cells: Vec<&Value> = cells(&report).into_iter().map(|(_, cell)| cell).filter(under_shunt).collect();
    assert_eq!(cells.len(), 4);
    for cell in cells {
        assert!(cell["unseen"] == 0 && cell["on_shm"][0].as_u64().unwrap() > 0, "{cell}");
    }
    // The expected duration is printed first, also without a terminal.
    assert!(ended.stderr.starts_with("8 turns, about "), "{}", ended.stderr);
}

#[test]
fn a_real_server_is_measured_and_a_page_with_plots_is_written() {
    let shell = Shell::new();
    let page = shell.path("report.html");
    let sides = ["--sides", "tcp-nodelay,unix,shunt", "--html", page.to_str().unwrap()];
    let report = bench(&[&["memcached", "stream"][..], &sides].concat());
    let servers = report["tables"][1]["lines"].as_array().unwrap();
    assert!(servers.iter().all(|line| line["missing"].is_null()), "{servers:?}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains("in one direction"), "no plot");
}

/// The lower bounds are the round-trip times of the lab's links.
#[test]
fn the_lab_is_as_far_as_it_says_on_every_way() {
    needs_root();
    let shell = Shell::new();
    let page = shell.path("report.html");
    let mut command = shell.shunt(["bench", "relay", "--json", "--repeats", "1", "--sizes", "10k,100k"]);
    command
        .args(["--ways", "direct,routed,ssh,haproxy-window,relay-turbo", "downloads", "--html"])
        .arg(&page);
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let ways = report["ways"].as_array().unwrap();
    assert_eq!(ways.len(), 5);
    for way in ways {
        assert!(way["missing"].is_null(), "{way}");
        let downloads = way["downloads"].as_array().unwrap();
        assert_eq!(downloads.len(), 2);
        for (download, floor) in downloads.iter().zip(report["floors"].as_array().unwrap()) {
            let seconds = |of: &str| download[of]["min"].as_f64().unwrap();
            assert!(seconds("first_byte") >= floor[1]["first_byte"].as_f64().unwrap(), "{way}");
            assert!(seconds("total") >= floor[1]["total"].as_f64().unwrap(), "{way}");
            assert!(seconds("total") >= seconds("first_byte"), "{way}");
        }
        let whole = way["way"] == "relay-turbo";
        // A download needs a handshake over the whole path, and then the request. Only this
        // project's relay saves the handshake.
        assert_eq!(downloads[0]["first_byte"]["min"].as_f64().unwrap() < 2.0 * 0.2737, whole, "{way}");
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("<svg").count(), 2);
}

/// A packet cannot arrive before the delay of its link has passed.
#[test]
fn a_download_is_seen_packet_by_packet_at_both_ends_of_every_link() {
    needs_root();
    let shell = Shell::new();
    let plots = shell.path("plots");
    let mut command = shell.shunt(["bench", "relay", "time-lines", "--json", "--repeats", "1"]);
    command.args(["--ways", "direct,relay-turbo", "--svg"]).arg(&plots);
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let ways = report["ways"].as_array().unwrap();
    let links = [("client", "edge", 0.0327), ("edge", "exit", 0.215), ("exit", "server", 0.026)];
    let expected = [vec![("client", "server", 0.2737)], links.to_vec()];
    assert_eq!(ways.len(), expected.len());
    for (way, links) in ways.iter().zip(expected) {
        let packets = way["time_line"]["packets"].as_array().unwrap();
        for (one, other, rtt) in links {
            for (from, to) in [(one, other), (other, one)] {
                let on_link = packets.iter().filter(|packet| packet["from"] == from && packet["to"] == to);
                let times: Vec<f64> = on_link
                    .map(|packet| packet["there"].as_f64().unwrap() - packet["at"].as_f64().unwrap())
                    .collect();
                assert!(!times.is_empty(), "nothing from {from} to {to}: {way}");
                assert!(times.iter().all(|time| *time >= rtt / 2.0), "{from} to {to}: {times:?}");
            }
        }
        let first = |kind: &str| packets.iter().position(|packet| packet["kind"] == kind).unwrap();
        assert!(first("handshake") < first("request") && first("request") < first("answer"), "{way}");
        let moments: Vec<f64> = way["moments"]
            .as_array()
            .unwrap()
            .iter()
            .map(|moment| moment["median"].as_f64().unwrap())
            .collect();
        assert!(moments.len() == 4 && moments.is_sorted(), "{moments:?}");
    }
    assert!(std::fs::read_to_string(plots.join("time-lines.svg")).unwrap().contains("<svg"));
}

/// The test only checks that progress was counted wherever there was a competing load, not how
/// much.
#[test]
fn the_ways_to_wait_are_measured_where_others_want_the_processors() {
    let report =
        bench(&["busy", "--sides", "tcp,shunt,shunt-fixed", "--line", "4 threads compute", "--line", "half"]);
    let tables = report["tables"].as_array().unwrap().iter();
    let lines: Vec<&Value> = tables.flat_map(|table| table["lines"].as_array().unwrap()).collect();
    assert_eq!(lines.len(), 3 * 2, "{report}");
    for line in lines {
        let is_half = line["label"].as_str().unwrap().starts_with("half");
        if let Some(missing) = line["missing"].as_str() {
            assert!(is_half && missing.contains("control group"), "{line}");
            continue;
        }
        for cell in line["cells"].as_array().unwrap() {
            let is_tcp = cell["side"] == "tcp";
            assert!(cell["figure"]["median"].as_f64().unwrap() > 0.0, "{line}");
            assert_eq!(cell["cpu_to"]["tcp"].is_null(), is_tcp, "{cell}");
            assert_eq!(cell["beside"].is_null(), is_half, "{cell}");
            assert_eq!(cell["beside_to"]["tcp"].is_null(), is_tcp || is_half, "{cell}");
            // How many connections are attached after so short a time depends on the machine.
            assert!(is_tcp || cell["on_shm"][1].as_u64().unwrap() > 0, "nobody was seen: {cell}");
        }
    }
}

#[test]
fn what_only_one_side_costs_is_told_of_real_servers() {
    let report = bench(&["one-sided", "--sides", "tcp-nodelay,server-only", "--line", ", one connection"]);
    let lines = report["tables"][0]["lines"].as_array().unwrap();
    assert_eq!(lines.len(), 2, "{report}");
    for line in lines {
        assert!(line["missing"].is_null(), "{line}");
        let [native, server] = [0, 1].map(|cell| &line["cells"][cell]);
        assert!(native["to_native"].is_null(), "{native}");
        for what in ["cpu", "rate"] {
            let judged = &server["to_native"][what];
            assert!(judged["median"].as_f64().unwrap() > 0.0, "{server}");
            assert!(
                judged["interval"].is_null() && judged["within"].is_null(),
                "one round tells nothing: {server}"
            );
        }
    }
}

#[test]
fn a_relays_threads_and_buffers_are_measured() {
    let report = bench(&["relaying"]);
    let cells = cells(&report);
    assert_eq!(cells.len(), 4 + 2 * 4, "{report}");
    for (line, cell) in cells {
        assert!(cell["figure"]["median"].as_f64().unwrap() > 0.0, "{line}");
        assert_eq!(cell["side"], "tcp-nodelay", "shunt has no part in it");
    }
}

#[test]
fn messages_go_by_every_way_that_carries_them() {
    let shell = Shell::new();
    let page = shell.path("report.html");
    let mut command = shell.shunt(["bench", "ipc", "--json", "--repeats", "1", "--seconds", "0.01"]);
    command.args(["--sizes", "0,112192,4194304", "--html"]).arg(&page);
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let sizes = report["sizes"].as_array().unwrap();
    assert_eq!(sizes.len(), 3);
    for line in sizes {
        let ways = line["ways"].as_array().unwrap();
        assert_eq!(ways.len(), 18);
        for cell in ways {
            // No datagram carries this message, however large a socket's buffer may be on this
            // machine.
            let sockets = ["datagram", "seqpacket", "zstd", "gzip"];
            let way = cell["way"].as_str().unwrap();
            if line["size"] == 4_194_304 && sockets.contains(&way) {
                continue;
            }
            assert_eq!(cell["refused"], false, "{cell}");
            assert!(cell["wall_us"]["median"].as_f64().unwrap() > 0.0, "{cell}");
        }
    }
    let sessions = report["sessions"]["ways"].as_array().unwrap();
    assert_eq!(sessions.len(), 18);
    for cell in sessions {
        assert!(cell["wall_us"]["median"].as_f64().unwrap() > 0.0, "{cell}");
    }
    for cell in report["round_trips"]["ways"].as_array().unwrap() {
        let [p50, p99] = ["p50_us", "p99_us"].map(|figure| cell[figure]["median"].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99, "{cell}");
    }
    let receivers = report["receivers"].as_array().unwrap();
    // Four sizes, three numbers of receivers, and two ways.
    assert_eq!(receivers.len(), 24);
    for cell in receivers {
        let may_be_refused = cell["way"] == "datagram" && cell["size"] == 1 << 20;
        assert!(may_be_refused || cell["refused"] == false, "{cell}");
        let is_measured = cell["wall_us"]["median"].as_f64().is_some_and(|wall| wall > 0.0);
        assert_eq!(is_measured, cell["refused"] == false, "{cell}");
    }
    let calls = report["calls"]["ways"].as_array().unwrap();
    let missing = &report["calls"]["missing"];
    assert!(!missing.is_null() || calls.len() == 18, "{missing}");
    assert!(std::fs::read_to_string(page).unwrap().contains("<svg"));
}

#[test]
fn containers_of_two_hosts_are_on_the_transports_that_they_are_measured_on() {
    needs_root();
    let shell = Shell::new();
    let page = shell.path("report.html");
    let mut command =
        shell.shunt(["bench", "overlay", "--json", "--repeats", "1", "--seconds", "0.05", "--html"]);
    command.arg(&page);
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let loads = report["loads"].as_array().unwrap();
    assert_eq!(loads.len(), 16);
    for load in loads {
        assert!(load["missing"].is_null(), "{load}");
        // wrk sends before it checks that it is connected, so its connections stay on the overlay.
        // Short connections may stay there too.
        let may_stay = load["what"] == "nginx" || load["what"] == "short";
        let stay = may_stay || load["on_overlay"] == serde_json::json!({});
        assert!(load["on_host"].as_u64() > Some(0) && stay, "{load}");
        // The processor time of a turn this short may be zero.
        let rate = &load["figures"][0];
        for side in ["host", "vxlan", "shunt", "secure", "shunt_to_host", "shunt_to_vxlan", "secure_to_shunt"]
        {
            assert!(rate[side]["median"].as_f64().unwrap() > 0.0, "{load}");
        }
    }
    // There are two connections. The policy for one of them changes, and finally denies it. The
    // other one continues.
    let over_time = &report["over_time"];
    let phases = over_time["phases"].as_array().unwrap();
    assert_eq!(
        (&phases[0]["label"], &phases[phases.len() - 1]["label"]),
        (&"no policy".into(), &"denied".into())
    );
    assert!(phases.len() >= 6, "{over_time}");
    let [one, other] = [0, 1].map(|flow| &over_time["flows"][flow]);
    assert!(one["ended"].as_str().unwrap().contains("abort") && other["ended"].is_null(), "{over_time}");
    // How often each side reports its bytes depends on the machine.
    let denied = &phases[phases.len() - 1]["medians"];
    assert!(denied[0].is_null() && denied[1].as_f64() > Some(0.0), "{over_time}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.matches("<svg").count() >= 3 && page.contains("at most"));
}

/// The bounds are lower bounds only. Every connection of the distant containers uses the host
/// network, including the first.
#[test]
fn hosts_are_as_far_from_each_other_as_they_are_said_to_be() {
    needs_root();
    let shell = Shell::new();
    let mut command = shell.shunt(["bench", "overlay", "set-up", "--rtt", "40"]);
    command.args(["--json", "--repeats", "1", "--seconds", "0.3"]);
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    for load in report["loads"].as_array().unwrap() {
        assert!(load["on_host"].as_u64() > Some(0) && load["on_overlay"] == serde_json::json!({}), "{load}");
        let mut figures = load["figures"].as_array().unwrap().iter();
        let median = figures.find(|figure| figure["label"] == "median, us").unwrap();
        for side in ["host", "vxlan", "shunt", "secure"] {
            // The time covers the handshake, and one byte in each direction.
            assert!(median[side]["min"].as_f64().unwrap() >= 80_000.0, "{load}");
        }
    }
}

/// The report names the missing tool and how to install it. Nothing else fails.
#[test]
fn without_an_engine_no_containers_are_measured() {
    let shell = Shell::new();
    let mut command = shell.shunt(["bench", "local", "containers", "--json", "--repeats", "1"]);
    command.env("DOCKER_HOST", format!("unix://{}", shell.path("nobody.sock").display()));
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let lines = report["tables"][0]["lines"].as_array().unwrap();
    assert_eq!(lines.len(), 9, "{report}");
    for line in lines {
        let missing = line["missing"].as_str().unwrap();
        assert!(missing.contains("systemctl start docker") || missing.contains("not installed"), "{line}");
    }
}

/// The test only checks that every step takes some time, and that the steps add up to the total.
#[test]
fn a_container_that_moves_is_timed_step_by_step() {
    needs_root();
    let shell = Shell::new();
    let ended = Ended::of(shell.shunt(["bench", "overlay", "migration", "--json", "--repeats", "1"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["loads"], serde_json::json!([]));
    let ways = report["migration"]["ways"].as_array().unwrap();
    let names: Vec<_> = ways.iter().map(|way| way["way"].as_str().unwrap()).collect();
    assert_eq!(names, ["VXLAN", "shunt", "shunt, etcd"]);
    for way in ways {
        assert!(way["missing"].is_null(), "{way}");
        let times = way["steps"].as_array().unwrap().iter().map(|step| {
            let rounds = step["milliseconds"].as_array().unwrap();
            assert_eq!(rounds.len(), 1, "{way}");
            rounds[0].as_f64().unwrap()
        });
        let times: Vec<f64> = times.collect();
        // Under shunt there is one more step: until a connection uses the host network.
        assert_eq!(times.len(), if way["way"] == "VXLAN" { 5 } else { 6 }, "{way}");
        assert!(times.iter().all(|time| *time > 0.0), "{way}");
        assert!((times[..4].iter().sum::<f64>() - times[4]).abs() < 0.01, "{way}");
        assert!(times.get(5).is_none_or(|time| *time >= times[4]), "{way}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let shell = Shell::new();
    for (arguments, complaint) in [
        (vec!["bench", "local", "everything"], "possible values"),
        (vec!["bench", "local", "--seconds", "0"], "expected seconds"),
        (vec!["bench", "local", "--repeats", "0"], "0 is not in"),
        (vec!["bench", "ipc", "--sizes", "67108865"], "expected bytes"),
        (vec!["bench", "ipc", "--descriptors", "253"], "expected a number"),
        (vec!["bench", "relay", "--sizes", "10k,0"], "expected bytes"),
        (vec!["bench", "relay", "--bandwidth", "500"], "expected a rate"),
        (vec!["bench", "relay", "--ways", "teleport"], "possible values"),
        (vec!["bench", "overlay", "everything"], "possible values"),
        (vec!["bench", "overlay", "--rtt", "1000"], "1000 is not in"),
    ] {
        let ended = Ended::of(shell.shunt(arguments));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains(complaint), "{}", ended.stderr);
    }
}

#[test]
fn an_interrupted_comparison_leaves_nothing_behind() {
    for (signal, number) in [("INT", 2), ("TERM", 15)] {
        let shell = Shell::new();
        let place = shell.path("place");
        std::fs::create_dir(&place).unwrap();
        let mut command = shell.shunt(["bench", "local", "--seconds", "60", "round-trip"]);
        command.env("TMPDIR", &place);
        let bench = Running::start(command);
        eventually("two programs are measured", || shell.within().len() >= 2);
        assert_eq!(shell.brokers().len(), 1);
        bench.signal(signal);
        let ended = bench.end();
        assert_eq!(ended.signal, Some(number), "{ended:?}");
        assert_eq!((shell.within().len(), shell.brokers().len()), (0, 0));
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
    }
}

/// The receiver of the lock-free queue spins until it has its messages, and reads nothing else.
#[test]
fn loads_end_with_a_killed_comparison() {
    let shell = Shell::new();
    let place = shell.path("place");
    std::fs::create_dir(&place).unwrap();
    let mut command =
        shell.shunt(["bench", "ipc", "--ways", "queue-free", "--sizes", "64", "--seconds", "60"]);
    command.env("TMPDIR", &place);
    let bench = Running::start(command);
    eventually("two programs are measured", || shell.with_word("bench-worker").len() >= 2);
    bench.signal("KILL");
    assert_eq!(bench.end().signal, Some(9));
    eventually("they end", || shell.with_word("bench-worker").is_empty());
}

#[test]
fn no_thread_that_computes_is_left_behind() {
    let shell = Shell::new();
    let place = shell.path("place");
    std::fs::create_dir(&place).unwrap();
    let mut command =
        shell.shunt(["bench", "local", "busy", "--seconds", "60", "--line", "4 threads compute"]);
    command.env("TMPDIR", &place);
    let bench = Running::start(command);
    eventually("two programs are measured beside it", || shell.within().len() >= 3);
    bench.signal("INT");
    let ended = bench.end();
    assert_eq!(ended.signal, Some(2), "{ended:?}");
    assert_eq!(shell.within().len(), 0);
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
}

#[test]
fn no_control_group_is_left_behind() {
    let shell = Shell::new();
    let mut bench =
        Running::start(shell.shunt(["bench", "local", "busy", "--seconds", "60", "--line", "half"]));
    let own = bench.0.id();
    // The benchmark ends immediately if no control group can have the controller.
    eventually("two programs have half a processor", || {
        bench.0.try_wait().unwrap().is_some()
            || halves(own).iter().any(|programs| programs.lines().count() >= 2)
    });
    if bench.0.try_wait().unwrap().is_none() {
        bench.signal("INT");
    }
    let ended = bench.end();
    assert!(ended.signal == Some(2) || ended.stderr.contains("no control group"), "{ended:?}");
    assert_eq!(halves(own), Vec::<String>::new());
}

/// Returns the programs in each of a process's control groups that is limited to half a processor.
fn halves(of: u32) -> Vec<String> {
    let mut groups: Vec<_> = ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu"].map(std::path::PathBuf::from).into();
    let mut found = Vec::new();
    while let Some(group) = groups.pop() {
        let read = |name| std::fs::read_to_string(group.join(name)).unwrap_or_default();
        let is_half = read("cpu.max").starts_with("50000 ") || read("cpu.cfs_quota_us").trim() == "50000";
        if is_half && group.file_name().unwrap().to_string_lossy().starts_with(&format!("shunt-{of}-")) {
            found.push(read("cgroup.procs"));
        }
        let below = std::fs::read_dir(&group).into_iter().flatten().flatten().map(|entry| entry.path());
        groups.extend(below.filter(|path| path.is_dir() && !path.is_symlink()));
    }
    found
}

#[test]
fn an_interrupted_lab_leaves_nothing_behind() {
    needs_root();
    let shell = Shell::new();
    let place = shell.path("place");
    std::fs::create_dir(&place).unwrap();
    let mut command = shell.shunt(["bench", "relay", "--ways", "ssh", "--sizes", "1000m", "downloads"]);
    command.env("TMPDIR", &place);
    let bench = Running::start(command);
    eventually("the client downloads through ssh", || {
        !shell.with_word("fetch").is_empty() && !shell.with_word("sshd_config").is_empty()
    });
    bench.signal("INT");
    let ended = bench.end();
    assert_eq!(ended.signal, Some(2), "{ended:?}");
    assert_eq!(shell.within().len(), 0);
    eventually("sshd's processes end", || shell.with_word("sshd").is_empty());
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
}

#[test]
fn interrupted_containers_leave_nothing_behind() {
    needs_root();
    let shell = Shell::new();
    let place = shell.path("place");
    std::fs::create_dir(&place).unwrap();
    let mut command = shell.shunt(["bench", "overlay", "--seconds", "60", "memcached"]);
    command.env("TMPDIR", &place);
    let bench = Running::start(command);
    eventually("a load is measured", || !shell.with_word("--connections").is_empty());
    bench.signal("TERM");
    let ended = bench.end();
    assert_eq!(ended.signal, Some(15), "{ended:?}");
    eventually("everything ends", || shell.within().is_empty());
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
}
