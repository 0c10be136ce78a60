//! Tests of `shunt-runtime` as a container engine calls it, with a script instead of runc, and of
//! `shunt runtime`, which registers it with Docker.

mod common;

use common::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::process::Command;

/// A runtime that prints its arguments, descriptors and environment.
const RUNC: &str = r#"#!/bin/sh
echo "$@" >> "$XDG_RUNTIME_DIR/calls"
case "$*" in *state*) cat "$XDG_RUNTIME_DIR/state"; exit;; esac
for word in "$@"; do printf '[%s]' "$word"; done
cat
cat <&9
env | sort
grep -E 'Sig(Ign|Blk)' /proc/self/status
echo to standard error >&2
exit 37
"#;

/// The beginning of each script: the settings with the real runtime, and functions that call it
/// with and without `shunt-runtime`.
const BEGIN: &str = r#"cd "$XDG_RUNTIME_DIR"
export SHUNT_RUNTIME_SETTINGS="$PWD/runtime.toml"
stand_in() { "$XDG_RUNTIME_DIR/shunt-runtime" "$@"; }
"#;

/// Returns a shell with both runtimes.
fn shell() -> Shell {
    let shell = Shell::new();
    symlink(env!("CARGO_BIN_EXE_shunt"), shell.path("shunt-runtime")).unwrap();
    let runc = shell.file("runc", RUNC);
    fs::write(shell.path("runtime.toml"), format!("runtime = {runc:?}\n")).unwrap();
    shell
}

fn script(shell: &Shell, script: &str) -> Ended {
    shell.sh(&format!("{BEGIN}{script}"))
}

#[test]
fn the_runtime_gets_everything_as_it_was_given() {
    let shell = shell();
    let given = |program: &str, before: &str| {
        let words = r#"--root /r 'a  b' '' "$(printf 'x\377y\nz')" -- '*' "#;
        let ended = Ended::of({
            let mut command = Command::new("sh");
            let line = format!(
                "{BEGIN}{before} echo in | {program} {words} 9<runtime.toml 2>error | od -c; \
                 {program} kill x 9</dev/null </dev/null >/dev/null 2>&1; echo $?; cat error"
            );
            command.args(["-c", &line]).env("XDG_RUNTIME_DIR", shell.path(""));
            command
        });
        ended.quietly(0).stdout
    };
    for before in ["", "trap '' PIPE;"] {
        let direct = given("./runc", before);
        assert!(direct.contains("37\n") && direct.ends_with("to standard error\n"), "{direct}");
        assert_eq!(given("stand_in", before), direct);
    }
}

#[test]
fn without_settings_it_is_runc_as_path_finds_it() {
    let shell = shell();
    let line = "export SHUNT_RUNTIME_SETTINGS=/no/such PATH=\"$PWD:$PATH\"; stand_in delete it 9</dev/null 2>/dev/null";
    let ended = script(&shell, line).quietly(37);
    assert!(ended.stdout.starts_with("[delete][it]"), "{ended:?}");
}

#[test]
fn another_runtime_than_the_one_that_was_meant_is_never_started() {
    let shell = shell();
    let called = || shell.path("calls").exists();
    script(&shell, "echo 'runtimes = 1' > runtime.toml; stand_in create it").saying(1, &["runtime.toml"]);
    script(&shell, "echo 'runtime = \"/no/crun\"' > runtime.toml; stand_in create it")
        .saying(1, &["/no/crun"]);
    let itself = "echo \"runtime = \\\"$PWD/shunt-runtime\\\"\" > runtime.toml";
    script(&shell, &format!("{itself}; stand_in create it")).saying(1, &["shunt itself"]);
    // The error goes to the log in which an engine looks for it.
    script(&shell, "stand_in --log=log --log-format json create it").quietly(1);
    let log: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(shell.path("log")).unwrap()).unwrap();
    assert_eq!(log["level"], "error");
    assert!(log["msg"].as_str().unwrap().contains("shunt itself"), "{log}");
    assert!(!called());
}

#[test]
fn what_cannot_be_under_shunt_is_as_it_was_and_the_log_says_why() {
    let shell = shell();
    let config = shell.path("bundle/config.json");
    fs::create_dir(shell.path("bundle")).unwrap();
    for (text, why) in [
        ("rubbish", "not understood"),
        (r#"{"process": {}, "root": {"path": "/"}}"#, "no broker: /run/shunt/broker is missing"),
    ] {
        fs::write(&config, text).unwrap();
        let before = fs::metadata(&config).unwrap().ino();
        let line = "stand_in --log log create --bundle bundle it 9</dev/null 2>/dev/null";
        let ended = script(&shell, line).quietly(37);
        assert!(ended.stdout.starts_with("[--log][log][create][--bundle][bundle][it]"), "{ended:?}");
        assert_eq!(
            (fs::read_to_string(&config).unwrap().as_str(), fs::metadata(&config).unwrap().ino()),
            (text, before)
        );
        let log = fs::read_to_string(shell.path("log")).unwrap();
        assert!(log.lines().last().unwrap().contains(why), "{log}");
    }
    let line =
        "export SHUNT_LIB=/no/libshunt.so; stand_in --log log create -b bundle it 9</dev/null 2>/dev/null";
    script(&shell, line).quietly(37);
    let log = fs::read_to_string(shell.path("log")).unwrap();
    assert!(log.lines().last().unwrap().contains("SHUNT_LIB names /no/libshunt.so"), "{log}");
    fs::remove_file(&config).unwrap();
    script(&shell, "stand_in --log log run -b bundle it 9</dev/null 2>/dev/null").quietly(37);
    assert!(fs::read_to_string(shell.path("log")).unwrap().ends_with("(os error 2)\"\n"));
}

/// Creates a bundle whose image has this machine's glibc, in a mount namespace with a broker's
/// directory.
const WITH_BROKER: &str = r#"mount -t tmpfs none /run
mkdir -p /run/shunt/broker bundle rootfs
for file in /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 /lib/*-linux-gnu/libc.so.6; do
    [ ! -e "$file" ] || cp -L --parents "$file" rootfs
done
echo '{"process": {"env": []}, "root": {"path": "../rootfs"}}' > bundle/config.json
"#;

#[test]
fn a_bundle_that_cannot_be_written_is_run_as_it_is() {
    needs_root();
    let shell = shell();
    let inside = format!(
        "{BEGIN}{WITH_BROKER}mount --bind bundle bundle; mount -o remount,bind,ro bundle\n\
         stand_in --log log create -b bundle it 9</dev/null 2>/dev/null; echo $?; cat bundle/config.json; umount bundle\n\
         stand_in --log log create -b bundle it 9</dev/null >/dev/null 2>&1; cat bundle/config.json; ls -A bundle"
    );
    let ended = shell.sh(&format!("unshare --mount sh -c '{}'", inside.replace('\'', "'\\''"))).quietly(0);
    let mut lines = ended.stdout.lines().skip_while(|line| *line != "37").skip(1);
    assert_eq!(lines.next(), Some(r#"{"process": {"env": []}, "root": {"path": "../rootfs"}}"#), "{ended:?}");
    let log = fs::read_to_string(shell.path("log")).unwrap();
    assert!(log.contains("Read-only file system") && log.lines().count() == 1, "{log}");
    // If the file can be written, it is changed.
    let config = lines.next().unwrap();
    assert!(config.contains(r#""env": ["LD_PRELOAD=/usr/local/lib/shunt/libshunt.so"]"#), "{config}");
    assert_eq!(lines.collect::<Vec<_>>(), ["config.json"], "nothing is left beside it");
}

#[test]
fn another_process_of_a_container_is_under_shunt_as_the_container_is() {
    let shell = shell();
    fs::create_dir(shell.path("bundle")).unwrap();
    fs::write(shell.path("state"), format!("{{\"bundle\": {:?}}}", shell.path("bundle"))).unwrap();
    let preload = "LD_PRELOAD=/usr/local/lib/shunt/libshunt.so";
    let exec = || {
        fs::write(shell.path("process"), r#"{"args": ["sh"], "env": ["A=b"]}"#).unwrap();
        let line = "stand_in --root /r exec --process process --detach it 9</dev/null >/dev/null 2>&1";
        script(&shell, line).quietly(37);
        fs::read_to_string(shell.path("process")).unwrap()
    };
    fs::write(shell.path("bundle/config.json"), r#"{"process": {}}"#).unwrap();
    assert_eq!(exec(), r#"{"args": ["sh"], "env": ["A=b"]}"#);
    fs::write(shell.path("bundle/config.json"), format!(r#"{{"process": {{"env": ["{preload}:/a.so"]}}}}"#))
        .unwrap();
    assert_eq!(exec(), format!(r#"{{"args": ["sh"], "env": ["A=b","{preload}"]}}"#));
    let calls = fs::read_to_string(shell.path("calls")).unwrap();
    let first: Vec<_> = calls.lines().take(2).collect();
    assert_eq!(first, ["--root /r state it", "--root /r exec --process process --detach it"]);
    // A container that the real runtime does not know is left to that runtime.
    fs::write(shell.path("state"), "").unwrap();
    assert_eq!(exec(), r#"{"args": ["sh"], "env": ["A=b"]}"#);
}

/// Without CAP_SYS_ADMIN, a process cannot install the filter without no_new_privs, as the runtime
/// requires.
const UNABLE: &str = "setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin --";

/// On a host with an overlay, all processes that the runtime starts in a container of the overlay
/// are under the filter. No process without the filter is started in an untrusted container.
#[test]
fn what_is_started_on_a_host_of_an_overlay_is_under_the_filter_or_not_started() {
    needs_root();
    let shell = shell();
    let mut settings = fs::read_to_string(shell.path("runtime.toml")).unwrap();
    settings += &format!("router = {:?}\n", shell.path("overlay/router.sock"));
    fs::write(shell.path("runtime.toml"), settings).unwrap();
    fs::create_dir(shell.path("overlay")).unwrap();
    fs::create_dir(shell.path("bundle")).unwrap();
    fs::write(shell.path("state"), format!("{{\"bundle\": {:?}}}", shell.path("bundle"))).unwrap();
    fs::write(shell.path("process"), r#"{"args": ["sh"], "env": []}"#).unwrap();
    shell.file("runc", RUNC.replace("grep -E 'Sig", "grep -E 'Seccomp:|NoNewPrivs:|Sig"));
    let container = |environment: &str, namespaces: &str| {
        let config = format!(
            r#"{{"process": {{"env": [{environment}]}}, "linux": {{"namespaces": [{namespaces}]}}}}"#
        );
        fs::write(shell.path("bundle/config.json"), config).unwrap();
    };
    let call = |before: &str, words: &str| {
        let line = format!("{before} ./shunt-runtime --log log {words} it 9</dev/null 2>/dev/null");
        script(&shell, &line)
    };
    let (create, exec) = ("create --bundle bundle", "exec --process process");
    let is_filtered = |ended: Ended| {
        let filter = ended.stdout.lines().find_map(|line| line.strip_prefix("Seccomp:"));
        assert!(ended.stdout.contains("NoNewPrivs:\t0"), "{ended:?}");
        filter.expect("the runtime is there").trim() != "0"
    };
    let own = r#"{"type": "network"}, {"type": "pid"}"#;
    // The router does not answer, so containers count as untrusted.
    container("", own);
    assert!(is_filtered(call("", create).quietly(37)));
    assert!(is_filtered(call("", exec).quietly(37)));
    call(UNABLE, exec).quietly(1);
    let log = fs::read_to_string(shell.path("log")).unwrap();
    assert!(log.lines().last().unwrap().contains("that is not trusted without a supervisor"), "{log}");
    // A container that needs the filter, but cannot get it, is not started either.
    call(UNABLE, create).quietly(1);
    let log = fs::read_to_string(shell.path("log")).unwrap();
    assert!(log.lines().last().unwrap().contains("that is not trusted without a supervisor"), "{log}");
    // If the user requests it, the container stays on the overlay. It is under the filter anyway.
    container(r#""SHUNT_OVERLAY=off""#, own);
    assert!(is_filtered(call("", create).quietly(37)));
    call(UNABLE, exec).quietly(1);
    for namespaces in [r#"{"type": "pid"}"#, r#"{"type": "network"}, {"type": "user"}"#] {
        container("", namespaces);
        assert!(!is_filtered(call("", create).quietly(37)));
        assert!(!is_filtered(call("", exec).quietly(37)));
    }
}

/// If shunt does not understand the command line, the real runtime could start any process. So it
/// is not called.
#[test]
fn what_is_not_understood_is_refused_where_containers_are_not_trusted() {
    needs_root();
    let shell = shell();
    fs::create_dir(shell.path("bundle")).unwrap();
    let config =
        r#"{"process": {"env": []}, "linux": {"namespaces": [{"type": "network"}, {"type": "pid"}]}}"#;
    fs::write(shell.path("bundle/config.json"), config).unwrap();
    fs::write(shell.path("state"), format!("{{\"bundle\": {:?}}}", shell.path("bundle"))).unwrap();
    shell.file("runc", RUNC.replace("grep -E 'Sig", "grep -E 'Seccomp:|Sig"));
    let call = |words: &str| {
        script(&shell, &format!("./shunt-runtime --log log {words} 9</dev/null 2>/dev/null </dev/null"))
    };
    let doubtful = [
        ("restore --bundle bundle it", "restore"),
        ("frobnicate --bundle bundle it", "frobnicate"),
        ("create --new-option bundle it", "--new-option"),
        ("create it --bundle bundle", "--bundle"),
        ("--new-option x create --bundle bundle it", "--new-option"),
        ("exec --new-option x it", "--new-option"),
    ];
    // On a host without an overlay, the command line is left to the real runtime.
    for (words, _) in doubtful {
        let ended = call(words).quietly(37);
        assert!(ended.stdout.contains("Seccomp:\t0"), "{ended:?}");
    }
    let mut settings = fs::read_to_string(shell.path("runtime.toml")).unwrap();
    settings += &format!("router = {:?}\n", shell.path("overlay/router.sock"));
    fs::write(shell.path("runtime.toml"), settings).unwrap();
    fs::create_dir(shell.path("overlay")).unwrap();
    fs::remove_file(shell.path("calls")).unwrap();
    for (words, named) in doubtful.into_iter().chain([
        ("create --bundle elsewhere it", "elsewhere/config.json"),
        ("create --bundle bundle --config other.json it", "other.json"),
    ]) {
        let ended = call(words).quietly(1);
        assert_eq!(ended.stdout, "", "{words}");
        let log = fs::read_to_string(shell.path("log")).unwrap();
        let last = log.lines().last().unwrap();
        assert!(last.contains("not trusted without a supervisor") && last.contains(named), "{words}: {last}");
    }
    assert!(!shell.path("calls").exists(), "the runtime behind has been called");
    // Known commands start their processes under the filter. Commands that start no process are
    // passed on.
    for words in ["create --pidfd-socket s --bundle bundle it", "exec --pidfd-socket s it"] {
        let ended = call(words).quietly(37);
        assert!(ended.stdout.contains("Seccomp:\t2"), "{words}: {ended:?}");
    }
    for words in ["kill it 9", "--root /r delete -f it", "features", "--version"] {
        call(words).quietly(37);
    }
}

#[test]
fn docker_is_told_of_it_and_told_again() {
    let shell = Shell::new();
    let file = shell.path("docker/daemon.json");
    let runtime = |action: &str| {
        let mut command = shell.for_everybody();
        command
            .args(["runtime", action, "--daemon-json"])
            .arg(&file)
            .env("SHUNT_RUNTIME_SETTINGS", "/no/such");
        command
    };
    Ended::of(runtime("register")).saying(1, &["shunt-runtime is not there", "ln -s"]);
    assert!(!file.exists());
    symlink("shunt-copy", shell.path("shunt-runtime")).unwrap();

    let ended = Ended::of(runtime("register")).quietly(0);
    assert!(
        ended.stdout.contains("docker run --runtime=shunt") && ended.stdout.contains("kill -HUP"),
        "{ended:?}"
    );
    assert!(Ended::of(runtime("register")).quietly(0).stdout.starts_with("already registered"));
    let path = shell.path("shunt-runtime");
    assert!(fs::read_to_string(&file).unwrap().contains(path.to_str().unwrap()));
    let mut status = runtime("status");
    status.arg("--json");
    let status: serde_json::Value = serde_json::from_str(&Ended::of(status).quietly(0).stdout).unwrap();
    assert_eq!(status["registered"]["found"], path.to_str().unwrap());
    assert_eq!(status["broker"]["problem"], "/run/shunt/broker/broker.sock: nothing listens there");
    let ended = Ended::of(runtime("status")).quietly(0);
    assert!(ended.stdout.starts_with("ok       registered"), "{ended:?}");

    Ended::of(runtime("unregister")).quietly(0);
    assert!(!file.exists(), "it was made for the runtime");
    fs::write(&file, "{\"debug\": true,}").unwrap();
    Ended::of(runtime("register")).saying(1, &["is left as it is", "daemon.json"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "{\"debug\": true,}");
}
