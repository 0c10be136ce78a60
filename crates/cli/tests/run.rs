//! Tests of `shunt run` from the view of a shell.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;

#[test]
fn the_exit_code_is_the_commands() {
    let shell = Shell::new();
    for code in [0, 1, 42, 255] {
        shell.run(["sh", "-c", &format!("exit {code}")]).quietly(code);
    }
}

#[test]
fn the_signal_is_the_commands() {
    let shell = Shell::new();
    let ended = shell.run(["sh", "-c", "kill -TERM $$"]);
    assert_eq!((ended.signal, ended.stderr.as_str()), (Some(15), ""));
    // SIGINT is not used, because a script's background job ignores it.
    let ended = shell.sh("$SHUNT run -- sh -c 'kill -USR1 $$'; echo $?");
    assert_eq!(ended.stdout, "138\n");
}

#[test]
fn the_command_takes_the_place_of_shunt() {
    let shell = Shell::new();
    let child =
        shell.shunt(["run", "--", "sh", "-c", "echo $$"]).stdout(std::process::Stdio::piped()).spawn();
    let child = child.unwrap();
    let pid = child.id();
    assert_eq!(Ended::from(child.wait_with_output().unwrap()).stdout, format!("{pid}\n"));
}

#[test]
fn arguments_and_standard_input_arrive_as_they_are() {
    let shell = Shell::new();
    let ended = shell.run(["printf", "%s.", "a b", "", "--json", "--", "é"]).quietly(0);
    assert_eq!(ended.stdout, "a b..--json.--.é.");
    assert_eq!(shell.sh("echo hello | $SHUNT run cat -").quietly(0).stdout, "hello\n");
}

#[test]
fn the_command_inherits_the_signals_that_were_ignored() {
    let shell = Shell::new();
    for traps in ["", "trap '' PIPE; ", "trap '' PIPE INT USR1; "] {
        let native = shell.sh(&format!("{traps}exec grep SigIgn /proc/self/status")).quietly(0);
        let ended = shell.sh(&format!("{traps}exec $SHUNT run grep SigIgn /proc/self/status")).quietly(0);
        assert_eq!(ended.stdout, native.stdout, "after {traps:?}");
    }
}

#[test]
fn the_command_inherits_no_child_and_no_ignored_signal() {
    let shell = Shell::new();
    let ended = shell.run(["sh", "-c", "echo $$; exec grep SigIgn /proc/self/status"]).quietly(0);
    let native = shell.sh("grep SigIgn /proc/self/status").stdout;
    let mut lines = ended.stdout.lines();
    let pid: u32 = lines.next().unwrap().parse().unwrap();
    assert_eq!(lines.next(), Some(native.trim_end()));
    let broker = ancestry(&shell.broker_pid().unwrap().to_string());
    assert_ne!(broker.parent, pid, "the broker is the command's child");
    assert_ne!(broker.session, ancestry("self").session);
}

struct Ancestry {
    parent: u32,
    /// 0 if the session was started outside this PID namespace.
    session: u32,
}

fn ancestry(pid: &str) -> Ancestry {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let mut fields = stat.rsplit(") ").next().unwrap().split(' ').skip(1);
    let mut next = || fields.next().unwrap().parse().unwrap();
    let parent = next();
    let _group = next();
    Ancestry { parent, session: next() }
}

#[test]
fn what_is_preloaded_already_stays() {
    let shell = Shell::new();
    let library = library().canonicalize().unwrap();
    let other = shell.path("other.so");
    compile(&other, "int other;", &["-shared", "-fPIC"]);
    let mut command = shell.shunt(["run", "--spin", "50", "--transport", "shm", "env"]);
    command.env("LD_PRELOAD", &other);
    let ended = Ended::of(command).quietly(0);
    for line in [
        format!("LD_PRELOAD={}:{}", library.display(), other.display()),
        format!("SHUNT_BROKER={}", shell.socket().display()),
        "SHUNT_SPIN=50".into(),
        "SHUNT_TRANSPORT=shm".into(),
    ] {
        assert!(ended.stdout.lines().any(|found| found == line), "{line} in {}", ended.stdout);
    }
    // A nested `shunt run` adds the shim only once.
    let ended = shell.sh("$SHUNT run -- $SHUNT run -- env").quietly(0);
    let preload = format!("LD_PRELOAD={}", library.display());
    assert!(ended.stdout.lines().any(|found| found == preload), "{}", ended.stdout);
}

#[test]
fn when_connections_are_offered_is_told_to_the_command() {
    let shell = Shell::new();
    for (flags, told) in [("", None), ("--offer used", Some("used")), ("--offer at-once", Some("at-once"))] {
        let ended = shell.sh(&format!("$SHUNT run {flags} -- env")).quietly(0);
        let found = ended.stdout.lines().find_map(|line| line.strip_prefix("SHUNT_OFFER="));
        assert_eq!(found, told, "{}", ended.stdout);
    }
    // A nested `shunt run` inherits the options of the outer one.
    let ended = shell.sh("$SHUNT run --offer at-once -- $SHUNT run -- env").quietly(0);
    assert!(ended.stdout.lines().any(|line| line == "SHUNT_OFFER=at-once"), "{}", ended.stdout);
    let ended = shell.sh("$SHUNT run --offer never -- true");
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("at-once"), "{ended:?}");
}

#[test]
fn a_command_that_cannot_start_is_refused_as_a_shell_does() {
    let shell = Shell::new();
    let plain = shell.file("plain", "#!/bin/sh\n");
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
    let orphan = shell.file("orphan", "#!/no/such/interpreter\n");
    let rubbish = shell.file("rubbish", b"\0\x01\x02\x03");
    let mut header = [0; 64];
    header[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xf3\0");
    let foreign = shell.file("foreign", header);
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let mut command = shell.shunt(["run", "--", "no-such-command"]);
    command.env("LC_ALL", "C");
    let ended = Ended::of(command);
    assert_eq!(ended.stderr, "shunt: no-such-command: command not found\n");
    assert_eq!(ended.code, Some(127));
    shell.run(["./no-such-file"]).saying(127, &["./no-such-file: No such file or directory"]);
    shell.run([path(&plain)]).saying(126, &["Permission denied"]);
    shell.run(["/"]).saying(126, &["/: Is a directory"]);
    shell.run([""]).saying(127, &["command not found"]);
    shell.run([path(&orphan)]).saying(127, &["required file not found"]);
    shell.run([path(&rubbish)]).saying(126, &["Exec format error"]);
    let ended = shell.run([path(&foreign)]);
    assert_eq!(ended.code, Some(126));
    assert!(ended.stderr.contains("another processor") && ended.stderr.contains("Exec format error"));
}

#[test]
fn a_file_without_a_first_line_is_a_shell_script() {
    let shell = Shell::new();
    let script = shell.file("script", "echo \"$1\"\nexit 5\n");
    let ended = shell.run([script.to_str().unwrap(), "argument"]).quietly(5);
    assert_eq!(ended.stdout, "argument\n");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_static_program_is_entered_without_a_word() {
    let shell = Shell::new();
    let source = "#include <stdio.h>\n#include <string.h>\nint main(void) { char line[256]; int found = 0;\n\
        for (FILE *maps = fopen(\"/proc/self/maps\", \"r\"); fgets(line, sizeof line, maps);)\n\
        found |= strstr(line, \"/libshunt.so\") != NULL;\n return found ? 9 : 1; }";
    for flags in [&["-static"][..], &["-static-pie", "-fPIE"]] {
        let program = shell.path("static");
        compile(&program, source, flags);
        shell.run([&program]).quietly(9);
        // A script behaves like its interpreter.
        let script = shell.file("script", format!("#!{}\n", program.display()));
        shell.run([&script]).quietly(9);
    }
}

#[test]
fn a_static_program_that_cannot_be_entered_runs_and_shunt_says_why() {
    let shell = Shell::new();
    let program = shell.path("static");
    // Shunt would use this register for its own data.
    let source = "long unused(void) { long word; __asm__(\"mov %%gs:0, %0\" : \"=r\"(word)); return word; }\n\
        int main(void) { return 9; }";
    compile(&program, source, &["-static"]);
    shell.run([&program]).saying(9, &["runs on TCP", "cannot enter it", "statically linked", "uses GS"]);
    // If the user has asked for TCP, nothing is printed.
    let mut command = shell.shunt(["run", "--transport", "tcp"]);
    command.arg(&program);
    Ended::of(command).quietly(9);
}

/// In another PID namespace, /proc may show a different process under this pid. Its memory must not
/// be written.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_static_program_is_not_looked_for_in_another_namespace_of_processes() {
    needs_root();
    let shell = Shell::new();
    let program = shell.path("static");
    compile(&program, "int main(void) { return 9; }", &["-static"]);
    let ended = shell.sh(&format!("unshare --pid --fork \"$SHUNT\" run -- {}", program.display()));
    ended.saying(9, &["runs on TCP", "cannot enter it", "another namespace of processes"]);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_32_bit_program_runs_without_a_word_from_the_dynamic_linker() {
    let shell = Shell::new();
    let program = shell.path("32bit");
    let source = "void _start(void) { __asm__(\"mov $1, %eax; mov $7, %ebx; int $0x80\"); }";
    compile(&program, source, &["-m32", "-nostdlib", "-static", "-fno-pie", "-no-pie"]);
    shell.run([&program]).saying(7, &["runs on TCP", "32-bit"]);
}

#[test]
fn a_program_of_another_libc_gets_no_preload() {
    let shell = Shell::new();
    let linker = shell.path("ld-uclibc-test.so.1");
    let program = shell.path("uclibc");
    let source = "#include <stdlib.h>\n#include <stdio.h>\n\
        int main(void) { puts(getenv(\"LD_PRELOAD\") ? getenv(\"LD_PRELOAD\") : \"nothing\"); }";
    compile(&program, source, &[&format!("-Wl,--dynamic-linker={}", linker.display())]);
    // This is glibc's dynamic linker under another name, so that the program runs here.
    let real = fs::read_to_string("/proc/self/maps").unwrap();
    let real =
        real.lines().find_map(|line| line.split(' ').next_back().filter(|path| path.contains("/ld-linux")));
    std::os::unix::fs::symlink(real.unwrap(), linker).unwrap();
    let ended = shell.run([&program]).saying(0, &["another libc"]);
    assert_eq!(ended.stdout, "nothing\n");
}

#[test]
fn a_setuid_program_is_told_apart() {
    needs_root();
    let shell = Shell::new();
    let program = shell.path("setuid-true");
    fs::copy("/bin/true", &program).unwrap();
    std::os::unix::fs::chown(&program, Some(NOBODY), None).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    shell.run([&program]).saying(0, &["runs on TCP", "setuid"]);
    // A setuid program that changes no user is entered: it belongs to root, and root runs it.
    std::os::unix::fs::chown(&program, Some(0), None).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    shell.run([&program]).quietly(0);
}

#[test]
fn a_program_with_capabilities_is_told_apart() {
    needs_root();
    let shell = Shell::new();
    let program = shell.path("capable-true");
    fs::copy("/bin/true", &program).unwrap();
    let status = Command::new("/usr/sbin/setcap").arg("cap_net_raw+ep").arg(&program).status();
    assert!(status.expect("setcap, of libcap2-bin").success());
    let runtime = shell.path("nobody");
    fs::create_dir(&runtime).unwrap();
    std::os::unix::fs::chown(&runtime, Some(NOBODY), Some(NOBODY)).unwrap();
    let mut command = shell.for_everybody();
    command.args(["run", "--"]).arg(&program).env("XDG_RUNTIME_DIR", &runtime).uid(NOBODY).gid(NOBODY);
    Ended::of(command).saying(0, &["runs on TCP", "capabilities"]);
    // Root gains nothing by file capabilities.
    shell.run([&program]).quietly(0);
}

#[test]
fn transport_tcp_needs_no_broker() {
    let shell = Shell::new();
    let ended = Ended::of(shell.shunt(["run", "--transport", "tcp", "--", "env"])).quietly(0);
    assert!(ended.stdout.contains("SHUNT_TRANSPORT=tcp\n"));
    assert!(!shell.socket().exists() && shell.brokers().is_empty());
}

#[test]
fn runs_at_once_start_one_broker() {
    let shell = Shell::new();
    let runs: Vec<_> = (0..8).map(|_| shell.shunt(["run", "--", "true"])).map(Running::start).collect();
    for run in runs {
        run.end().quietly(0);
    }
    eventually("one broker is left", || shell.brokers().len() == 1);
    assert_eq!(shell.broker_pid(), shell.brokers().first().copied());
}

#[test]
fn a_broker_that_was_asked_for_and_is_not_there_costs_one_line() {
    let shell = Shell::new();
    let socket = shell.path("other.sock");
    let mut command = shell.shunt(["run", "--broker"]);
    command.arg(&socket).args(["--", "env"]);
    let ended =
        Ended::of(command).saying(0, &["runs on TCP", "nothing listens there", "shunt daemon --socket"]);
    // The broker may start later. The shim checks for it.
    assert!(ended.stdout.contains(&format!("SHUNT_BROKER={}\n", socket.display())));
    assert!(shell.brokers().is_empty());
}

#[test]
fn a_broker_of_another_user_is_not_used() {
    needs_root();
    let shell = Shell::new();
    let socket = shell.path("foreign/broker.sock");
    fs::create_dir(socket.parent().unwrap()).unwrap();
    std::os::unix::fs::chown(socket.parent().unwrap(), Some(NOBODY), Some(NOBODY)).unwrap();
    let mut command = shell.for_everybody();
    command.args(["daemon", "--socket"]).arg(&socket).uid(NOBODY).gid(NOBODY);
    let broker = Running::start(command);
    eventually("it listens", || socket.exists());
    let mut command = shell.shunt(["run", "--broker"]);
    command.arg(&socket).args(["--", "env"]);
    let ended = Ended::of(command).saying(0, &["runs on TCP", "user 65534"]);
    assert!(!ended.stdout.contains("SHUNT_BROKER="), "the shim would use it");
    assert!(ended.stdout.contains("SHUNT_TRANSPORT=tcp\n"));
    let mut command = shell.shunt(["status", "--broker"]);
    command.arg(&socket);
    Ended::of(command).saying(1, &["user 65534"]);
    broker.signal("TERM");
    assert_eq!(broker.end().code, Some(0));
}

#[test]
fn no_broker_can_be_started_and_the_command_runs() {
    let shell = Shell::new();
    let mut command = shell.shunt(["run", "--", "sh", "-c", "exit 4"]);
    command.env("XDG_RUNTIME_DIR", "/proc");
    Ended::of(command).saying(4, &["runs on TCP", "/proc/shunt"]);
    // The path of the socket is a regular file.
    fs::create_dir(shell.path("shunt")).unwrap();
    fs::set_permissions(shell.path("shunt"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(shell.socket(), "").unwrap();
    let begin = Instant::now();
    shell.run(["sh", "-c", "exit 4"]).saying(4, &["runs on TCP", "did not start", "not a socket"]);
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[test]
fn no_shim_can_be_found_and_the_command_runs() {
    let shell = Shell::new();
    let mut command = shell.shunt(["run", "--", "sh", "-c", "exit 4"]);
    command.env("SHUNT_LIB", "/no/libshunt.so");
    Ended::of(command).saying(4, &["runs on TCP", "/no/libshunt.so", "shunt doctor"]);
}

#[test]
fn wrong_flags_are_exit_code_2() {
    let shell = Shell::new();
    for (line, word) in [
        (&["run"][..], "required"),
        (&["run", "--spin", "soon", "ls"], "expected auto, off, or microseconds"),
        (&["run", "--transport", "udp", "ls"], "auto, shm, tcp"),
        (&["run", "--no-such-flag", "ls"], "--no-such-flag"),
        (&["daemon", "--ring-bytes", "1000"], "power of two"),
        (&["daemon", "--idle-exit", "0"], "0"),
        (&["no-such-command"], "no-such-command"),
        (&[], "Usage"),
    ] {
        let ended = Ended::of(shell.shunt(line));
        assert_eq!(ended.code, Some(2), "{line:?}");
        assert!(ended.stderr.contains(word), "{line:?}: {}", ended.stderr);
    }
}
