//! Tests of what shunt prints about itself and the machine: status, doctor, help, manual pages,
//! completions, and the commands in docs/usage.md and docs/configuration.md.

mod common;

use common::*;

#[test]
fn status_as_json_is_the_snapshot() {
    let shell = Shell::new();
    Ended::of(shell.shunt(["status", "--json"])).saying(1, &["no broker is running"]);
    shell.run(["true"]).quietly(0);
    let ended = Ended::of(shell.shunt(["status", "--json"])).quietly(0);
    let status: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    for field in ["version", "broker_pid", "links", "pairs_made", "processes", "offers_refused"] {
        assert!(!status[field].is_null(), "{field} in {status}");
    }
    let ended = Ended::of(shell.shunt(["status"])).quietly(0);
    assert!(
        ended.stdout.starts_with("broker ") && ended.stdout.contains("No program is under shunt"),
        "{ended:?}"
    );
}

#[test]
fn commands_that_look_create_nothing() {
    let shell = Shell::new();
    for look in [&["status"][..], &["doctor"], &["top", "--once"], &["explain", "1"], &["status", "--json"]] {
        Ended::of(shell.shunt(look));
        assert!(!shell.path("shunt").exists(), "{look:?} has made the directory of the user's broker");
    }
    shell.run(["true"]).quietly(0);
    assert!(shell.socket().exists());
}

/// Both ends of a connection that moves bytes until the file "rest" is there: rests.py ROLE PORT HOW.
/// Then the server waits by recv, or with "exec" in HOW, it becomes another program, without the shim,
/// when the file "exec" is there.
const RESTS: &str = "import os, socket, sys, time\n\
    role, port, here = sys.argv[1], int(sys.argv[2]), os.path.dirname(sys.argv[0])\n\
    def rest(until):\n    while not os.path.exists(os.path.join(here, until)): time.sleep(0.01)\n    return True\n\
    if role == 'server':\n\
    \x20   listener = socket.create_server(('127.0.0.1', port))\n\
    \x20   open(os.path.join(here, 'listens'), 'w')\n\
    \x20   end = listener.accept()[0]\n\
    \x20   while (got := end.recv(1)) != b'.': end.sendall(got)\n\
    \x20   sys.argv[3] == 'exec' and rest('exec') or end.recv(1)\n\
    \x20   os.set_inheritable(end.fileno(), True)\n\
    \x20   os.execve('/bin/sleep', ['sleep', '1000'], {})\n\
    rest('listens')\n\
    end = socket.create_connection(('127.0.0.1', port))\n\
    while not os.path.exists(os.path.join(here, 'rest')): end.sendall(b'x'), end.recv(1)\n\
    end.sendall(b'.')\n\
    rest('end')\n";

/// Starts a server and a client that rest on shared memory.
fn resting(shell: &Shell, how: &str) -> [Running; 2] {
    let script = shell.file("rests.py", RESTS);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let programs = ["server", "client"].map(|role| {
        Running::start(shell.shunt(["run", "--", "python3", script.to_str().unwrap(), role, &port, how]))
    });
    eventually("both ends are on shared memory", || summary(shell)["on_shm"] == 2);
    shell.file("rest", "");
    programs
}

fn status(shell: &Shell) -> serde_json::Value {
    let ended = Ended::of(shell.shunt(["status", "--json", "--summary"]));
    serde_json::from_str(&ended.stdout).unwrap_or_default()
}

fn summary(shell: &Shell) -> serde_json::Value {
    status(shell)["summary"].clone()
}

#[test]
fn an_idle_end_is_on_tcp_when_its_peer_has_gone_back() {
    let shell = Shell::new();
    let [server, _client] = resting(&shell, "exec");
    shell.file("exec", "");
    let comm = format!("/proc/{}/comm", server.0.id());
    eventually("the server is another program", || std::fs::read_to_string(&comm).unwrap() == "sleep\n");
    let expected = serde_json::json!({"peer_went_back": 1});
    eventually("it is shown", || summary(&shell)["on_tcp_because"] == expected);
    assert_eq!(summary(&shell)["on_shm"], 0);
}

#[test]
fn pairs_of_an_earlier_broker_are_unknown() {
    let shell = Shell::new();
    let programs = resting(&shell, "recv");
    assert_eq!((&status(&shell)["links"], &status(&shell)["earlier_ends"]), (&1.into(), &0.into()));
    let pid = shell.broker_pid().unwrap().to_string();
    assert!(std::process::Command::new("kill").arg(&pid).status().unwrap().success());
    eventually("the broker ends", || shell.broker_pid().is_none());
    Ended::of(shell.shunt(["daemon", "--detach", "--idle-exit", "1"])).quietly(0);
    // The client sleeps without the shim, and registers later.
    eventually("one has registered", || status(&shell)["earlier_ends"].as_u64() > Some(0));
    let text = Ended::of(shell.shunt(["status"])).quietly(0).stdout;
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("since it was restarted (earlier pairs are unknown"), "{text}");
    drop(programs);
}

/// Each connection is too short for an offer, and the programs have ended before anybody looks.
#[test]
fn programs_that_have_ended_and_their_short_connections_are_in_the_status() {
    const PROGRAMS: usize = 8;
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port().to_string();
    let answers = std::thread::spawn(move || {
        for _ in 0..PROGRAMS {
            std::io::Write::write_all(&mut server.accept().unwrap().0, b"hello").unwrap();
        }
    });
    let ask =
        "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); assert c.recv(9)";
    for _ in 0..PROGRAMS {
        shell.run(["python3", "-c", ask, &port]).quietly(0);
    }
    answers.join().unwrap();
    let status = || {
        let ended = Ended::of(shell.shunt(["status", "--json"])).quietly(0);
        serde_json::from_str::<serde_json::Value>(&ended.stdout).unwrap()
    };
    // The broker may not have noticed the last end yet.
    eventually("all are shown", || status()["ended_processes"].as_array().unwrap().len() == PROGRAMS);
    let status = status();
    assert_eq!(status["share"]["seen"], PROGRAMS, "{status}");
    for process in status["ended_processes"].as_array().unwrap() {
        assert_eq!(process["counters"]["connections_short"], 1, "{status}");
        assert!(process["ended_seconds_ago"].is_u64(), "{status}");
    }
}

/// A program is shown from its start, before it has a connection.
#[test]
fn program_without_a_connection_is_in_the_status() {
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let sleeper = Running::start(shell.shunt(["run", "--", "sleep", "1000"]));
    eventually("it is shown", || {
        let ended = Ended::of(shell.shunt(["status"])).quietly(0);
        ended.stdout.contains("1 program under shunt that this broker does not know")
            && ended.stdout.contains("sleep (")
    });
    drop(sleeper);
}

#[test]
fn status_of_something_that_is_no_broker() {
    let shell = Shell::new();
    let path = shell.path("stream.sock");
    let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut command = shell.shunt(["status", "--broker"]);
    command.arg(&path);
    Ended::of(command).saying(1, &["not a broker's socket"]);
}

#[test]
fn doctor_finds_this_machine_fit() {
    let shell = Shell::new();
    let ended = Ended::of(shell.shunt(["doctor"])).quietly(0);
    assert!(
        ended.stdout.ends_with("Connections on this machine can take shared memory.\n"),
        "{}",
        ended.stdout
    );
    shell.run(["true"]).quietly(0);
    let ended = Ended::of(shell.shunt(["doctor", "--json"])).quietly(0);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["local_path"], true);
    let checks = report["checks"].as_array().unwrap();
    let check = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap();
    assert_eq!(check("sock_diag")["state"], "ok");
    assert_eq!(check("interception")["state"], "ok");
    assert_eq!(check("first windows")["state"], "ok");
    assert!(check("memory")["found"].as_str().unwrap().contains("shares up to 544 MiB"));
    assert!(check("own broker")["found"].as_str().unwrap().contains("protocol version"));
}

#[test]
fn doctor_says_what_is_missing_and_fails() {
    let shell = Shell::new();
    let mut command = shell.shunt(["doctor"]);
    command.env("SHUNT_LIB", "/no/libshunt.so");
    let ended = Ended::of(command).quietly(1);
    assert!(ended.stdout.contains("missing  libshunt.so"), "{}", ended.stdout);
    assert!(ended.stdout.contains("make install"), "{}", ended.stdout);
    // The file exists, but cannot be loaded.
    let rubbish = shell.file("libshunt.so", "rubbish");
    let mut command = shell.shunt(["doctor"]);
    command.env("SHUNT_LIB", rubbish);
    let ended = Ended::of(command).quietly(1);
    assert!(ended.stdout.contains("cannot be loaded"), "{}", ended.stdout);
}

#[test]
fn doctor_needs_proc_and_says_so() {
    let shell = Shell::new();
    let ended = shell.sh("unshare --mount sh -c 'umount --lazy /proc && $SHUNT doctor'");
    ended.saying(1, &["/proc is not mounted here", "mount -t proc"]);
}

#[test]
fn doctor_tells_a_libc_that_is_too_old() {
    let shell = Shell::new();
    // A library that was linked with a future libc.
    let newer = shell.path("newer");
    std::fs::create_dir(&newer).unwrap();
    let versions = shell.file("newer/versions", "GLIBC_2.99 { function_of_the_future; };");
    let script = format!("-Wl,-soname,libc.so.6,--version-script={}", versions.display());
    let libc = newer.join("libc.so.6");
    compile(&libc, "void function_of_the_future(void) {}", &["-shared", "-fPIC", "-nostdlib", &script]);
    let library = shell.path("libshunt.so");
    let source = "void function_of_the_future(void); void shim(void) { function_of_the_future(); }";
    let libc = libc.to_str().unwrap();
    compile(&library, source, &["-shared", "-fPIC", "-nostdlib", "-Wl,--no-as-needed", libc]);
    let mut command = shell.shunt(["doctor"]);
    command.env("SHUNT_LIB", library);
    let ended = Ended::of(command).quietly(1);
    assert!(ended.stdout.contains("version `GLIBC_2.99' not found"), "{}", ended.stdout);
    assert!(ended.stdout.contains("glibc 2.28 or later"), "{}", ended.stdout);
}

#[test]
fn without_the_package_of_the_comparisons_shunt_names_it() {
    let shell = Shell::new();
    let without = |arguments: &[&str]| {
        let mut command = shell.for_everybody();
        command.args(arguments).env_remove("SHUNT_BENCH").env("PATH", shell.path(""));
        Ended::of(command)
    };
    without(&["bench", "local", "memcached"]).saying(1, &["install shunt-bench"]);
    without(&["report"]).saying(1, &["install shunt-bench"]);
    // Their help and their errors need no package.
    let help = without(&["bench", "local", "--help"]).quietly(0);
    assert!(help.stdout.contains("bench local [OPTIONS]"), "{}", help.stdout);
    assert_eq!(without(&["bench", "local", "--repeats", "0"]).code, Some(2));
    // The program beside shunt is the one that is started, with all arguments.
    shell.file("shunt-bench", "#!/bin/sh\necho \"$@\"\n");
    let started = without(&["bench", "ipc", "--json"]).quietly(0);
    let own = shell.path("shunt-copy");
    assert_eq!(started.stdout, format!("--shunt {} bench ipc --json\n", own.display()));
}

#[test]
fn every_subcommand_has_help_a_manual_page_and_completions() {
    let shell = Shell::new();
    let directory = shell.path("man");
    let mut command = shell.shunt(["man"]);
    command.arg(&directory);
    Ended::of(command).quietly(0);
    let subcommands = [
        "run",
        "daemon",
        "status",
        "explain",
        "doctor",
        "config",
        "overlay",
        "runtime",
        "bench",
        "report",
        "man",
        "completions",
    ];
    for name in subcommands {
        let help = Ended::of(shell.shunt([name, "--help"])).quietly(0);
        assert!(help.stdout.contains(&format!("shunt {name}")), "{}", help.stdout);
        let page = std::fs::read_to_string(directory.join(format!("shunt-{name}.1"))).unwrap();
        assert!(page.contains(".TH"), "{page}");
    }
    assert!(std::fs::read_to_string(directory.join("shunt.1")).unwrap().contains("shunt\\-run"));
    let page = std::fs::read_to_string(directory.join("shunt-bench-local.1")).unwrap();
    assert!(page.contains("one\\-sided"), "{page}");
    for name in ["bash", "zsh", "fish"] {
        let script = Ended::of(shell.shunt(["completions", name])).quietly(0);
        assert!(subcommands.iter().all(|command| script.stdout.contains(command)), "{name}");
        // Those of the comparisons, which another program makes, are complete as well.
        let deep = ["lower-is-better", "no-spin", "one-sided"];
        assert!(deep.iter().all(|flag| script.stdout.contains(flag)), "{name}");
    }
    let version = Ended::of(shell.shunt(["--version"])).quietly(0);
    assert_eq!(version.stdout, format!("shunt {}\n", env!("CARGO_PKG_VERSION")));
}

/// Every block marked `console` is a shell session. Each command after `$ ` must exit with 0.
#[test]
fn the_commands_in_the_usage_page_work() {
    run_the_commands_of(include_str!("../../../docs/usage.md"), 5);
}

#[test]
fn the_commands_in_the_page_of_the_configuration_work() {
    run_the_commands_of(include_str!("../../../docs/configuration.md"), 8);
}

fn run_the_commands_of(page: &str, at_least: u32) {
    let shell = Shell::new();
    let mut session = false;
    let mut ran = 0;
    for line in page.lines() {
        match line.trim_start() {
            "```console" => session = true,
            "```" => session = false,
            line if session => {
                let Some(command) = line.strip_prefix("$ ") else { continue };
                let place = shell.path("").display().to_string();
                let ended = shell.sh(&format!("shunt() {{ \"$SHUNT\" \"$@\"; }}\ncd '{place}'\n{command}"));
                assert_eq!(ended.code, Some(0), "{command}: {ended:?}");
                ran += 1;
            }
            _ => {}
        }
    }
    assert!(ran >= at_least, "only {ran} commands were found");
}

#[test]
fn a_closed_pipe_ends_the_report_quietly() {
    let shell = Shell::new();
    let ended = shell.sh("$SHUNT completions bash | head -1");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
}
