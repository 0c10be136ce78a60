//! Tests of `shunt explain`. A real process meets each cause that keeps a program on TCP, and
//! connections are explained at both ends.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use serde_json::Value;

/// A process that reports its start and then waits until it is killed.
struct Idle(Child);

const IDLE: &str = "#include <unistd.h>\nint main(void) { write(1, \"up\", 2); pause(); }";

impl Idle {
    fn start(mut command: Command) -> Idle {
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let mut up = [0; 2];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
        Idle(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `shunt explain WHAT --json`.
fn explain(shell: &Shell, what: impl ToString) -> Value {
    let ended = Ended::of(shell.shunt(["explain", "--json", &what.to_string()])).quietly(0);
    serde_json::from_str(&ended.stdout).unwrap()
}

/// Returns the single cause that is reported for a process.
#[track_caller]
fn cause(shell: &Shell, process: &Idle) -> (String, String, String) {
    let report = explain(shell, process.pid());
    let found = &report["processes"][0];
    assert_eq!(found["pid"], process.pid());
    let causes = found["causes"].as_array().unwrap();
    assert_eq!(causes.len(), 1, "{report:#}");
    let word = |name: &str| causes[0][name].as_str().unwrap().to_owned();
    // The text contains the same sentences as the JSON.
    let text = Ended::of(shell.shunt(["explain", &process.pid().to_string()])).quietly(0).stdout;
    assert!(text.contains(&word("explanation")) && text.contains(&word("advice")), "{text}");
    (word("label"), word("explanation"), word("advice"))
}

#[track_caller]
fn has_cause(shell: &Shell, process: &Idle, label: &str, explanation: &str, advice: &str) {
    let found = cause(shell, process);
    assert_eq!(found.0, label, "{found:?}");
    assert!(found.1.contains(explanation) && found.2.contains(advice), "{found:?}");
}

fn compiled(shell: &Shell, name: &str, flags: &[&str]) -> std::path::PathBuf {
    let program = shell.path(name);
    compile(&program, IDLE, flags);
    program
}

/// Returns the command `shunt run WORDS`.
fn under_shunt(shell: &Shell, words: &[&str]) -> Command {
    let mut command = shell.shunt(["run", "--"]);
    command.args(words);
    command
}

#[test]
fn a_program_that_was_not_started_by_shunt() {
    let shell = Shell::new();
    let idle = Idle::start(Command::new(compiled(&shell, "idle", &[])));
    has_cause(&shell, &idle, "not_preloaded", "names no libshunt.so", "`shunt run -- idle`");
}

#[test]
fn programs_without_a_dynamic_linker_of_glibc() {
    let shell = Shell::new();
    for (name, flags) in [("static", &["-static"][..]), ("static-pie", &["-static-pie"])] {
        let program = compiled(&shell, name, flags);
        let idle = Idle::start(Command::new(&program));
        has_cause(&shell, &idle, "static", "It is statically linked.", "`shunt run -- ");
        // Its system calls can be intercepted instead.
        assert_eq!(explain(&shell, program.display())["file"]["can_be_entered"], true);
    }
    let linker = shell.path("ld-uclibc-test.so.1");
    let program = compiled(&shell, "uclibc", &[&format!("-Wl,--dynamic-linker={}", linker.display())]);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let real =
        maps.lines().find_map(|line| line.split(' ').next_back().filter(|path| path.contains("/ld-linux")));
    std::os::unix::fs::symlink(real.unwrap(), linker).unwrap();
    let idle = Idle::start(Command::new(program));
    has_cause(&shell, &idle, "other_libc", "ld-uclibc-test.so.1", "glibc or musl");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_32_bit_program() {
    let shell = Shell::new();
    let program = shell.path("32bit");
    // The program calls write(1, "up", 2) and then pause().
    let source = "void _start(void) { __asm__(\"push $0x7075; mov %esp, %ecx; mov $1, %ebx; mov $2, %edx; mov $4, %eax; \
                  int $0x80; mov $29, %eax; int $0x80\"); }";
    compile(&program, source, &["-m32", "-nostdlib", "-static", "-fno-pie", "-no-pie"]);
    let idle = Idle::start(under_shunt(&shell, &[program.to_str().unwrap()]));
    has_cause(&shell, &idle, "other_word_size", "32-bit", "64-bit build");
}

#[test]
fn a_go_program() {
    let shell = Shell::new();
    // This is the note that the Go linker leaves in a dynamically linked program.
    let note = "__attribute__((section(\".note.go.buildid\"), used, aligned(4)))\n\
        static const struct { int name, text, kind; char owner[4], id[4]; } note = {4, 4, 4, \"Go\", \"abc\"};\n";
    let program = shell.path("golang");
    compile(&program, &format!("{note}{IDLE}"), &[]);
    let idle = Idle::start(under_shunt(&shell, &[program.to_str().unwrap()]));
    // The shim is loaded but has no effect: the program makes no system calls that could be
    // redirected.
    has_cause(&shell, &idle, "go", "makes system calls by itself", "that enters it, or says what else");
    let file = explain(&shell, program.display());
    assert_eq!(file["file"]["causes"][0]["label"], "go", "{file:#}");
}

#[test]
fn a_program_of_another_user_than_the_brokers() {
    needs_root();
    let shell = Shell::new();
    let program = compiled(&shell, "idle", &[]);
    let mut command = shell.for_everybody();
    // `setpriv` executes another program, which keeps nothing of the former user.
    command.args(["run", "--", "setpriv", "--reuid", &NOBODY.to_string()]).arg(&program);
    let idle = Idle::start(command);
    has_cause(&shell, &idle, "other_user", "It runs as user 65534", "shunt daemon --system");
}

#[test]
fn programs_in_secure_mode() {
    needs_root();
    let shell = Shell::new();
    for (name, mode, label) in [("setuid", 0o4755, "setuid"), ("setgid", 0o2755, "setgid")] {
        let program = compiled(&shell, name, &[]);
        std::os::unix::fs::chown(&program, Some(NOBODY), Some(NOBODY)).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        let idle = Idle::start(under_shunt(&shell, &[program.to_str().unwrap()]));
        has_cause(&shell, &idle, label, "the dynamic linker ignores LD_PRELOAD", "without that bit");
    }
    let program = compiled(&shell, "capable", &[]);
    let status = Command::new("/usr/sbin/setcap").arg("cap_net_raw+ep").arg(&program).status();
    assert!(status.expect("setcap, of libcap2-bin").success());
    let mut command = Command::new(&program);
    command.env("LD_PRELOAD", shell.path("libshunt.so")).uid(NOBODY).gid(NOBODY);
    let idle = Idle::start(command);
    has_cause(&shell, &idle, "capabilities", "file capabilities", "setpriv");
}

#[test]
fn an_environment_that_was_cleaned_on_the_way() {
    let shell = Shell::new();
    let program = compiled(&shell, "idle", &[]);
    // The shell stays as the parent, with the shim.
    let script = format!("env -i {} & echo $! > {}; wait", program.display(), shell.path("pid").display());
    let parent = Idle::start(under_shunt(&shell, &["sh", "-c", &script]));
    let pid = || fs::read_to_string(shell.path("pid")).ok()?.trim().parse::<u32>().ok();
    eventually("the pid is written", || pid().is_some());
    let report = explain(&shell, pid().unwrap());
    let _ = Command::new("kill").arg(pid().unwrap().to_string()).status();
    let cause = &report["processes"][0]["causes"][0];
    assert_eq!(cause["label"], "environment_cleaned", "{report:#}");
    let named = format!("sh (pid {})", parent.pid());
    assert!(cause["explanation"].as_str().unwrap().contains(&named), "{report:#}");
    assert!(cause["advice"].as_str().unwrap().contains("sudo shunt run -- idle"), "{report:#}");
}

#[test]
fn a_shim_that_cannot_be_loaded() {
    let shell = Shell::new();
    let program = compiled(&shell, "idle", &[]);
    let preloading = |path: &Path| {
        let mut command = Command::new(&program);
        command.env("LD_PRELOAD", path).stderr(Stdio::null());
        Idle::start(command)
    };
    let absent = preloading(&shell.path("gone/libshunt.so"));
    has_cause(&shell, &absent, "out_of_reach", "gone/libshunt.so", "bind mount");
    let rubbish = preloading(&shell.file("libshunt.so", "rubbish"));
    has_cause(&shell, &rubbish, "not_loaded", "did not load it", "ld.so");
}

#[test]
fn a_program_on_tcp_by_policy_or_for_want_of_a_broker() {
    let shell = Shell::new();
    let program = compiled(&shell, "idle", &[]);
    let mut command = shell.shunt(["run", "--transport", "tcp", "--"]);
    command.arg(&program);
    has_cause(&shell, &Idle::start(command), "policy", "--transport tcp", "without --transport tcp");
    let mut command = Command::new(&program);
    command.env("LD_PRELOAD", library()).env("SHUNT_BROKER", shell.path("no.sock"));
    has_cause(&shell, &Idle::start(command), "no_broker", "No broker", "shunt daemon");
    // The listening socket does not belong to a compatible broker.
    let _other = std::os::unix::net::UnixListener::bind(shell.path("stream.sock")).unwrap();
    let mut command = Command::new(&program);
    command.env("LD_PRELOAD", library()).env("SHUNT_BROKER", shell.path("stream.sock"));
    has_cause(&shell, &Idle::start(command), "no_broker", "No broker", "shunt daemon");
}

#[test]
fn a_shim_that_was_replaced_and_a_filter() {
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let copy = shell.path("libshunt.so");
    fs::copy(library(), &copy).unwrap();
    let program = compiled(&shell, "idle", &[]);
    let mut command = Command::new(&program);
    command.env("LD_PRELOAD", &copy).env("SHUNT_BROKER", shell.socket());
    let idle = Idle::start(command);
    assert_eq!(explain(&shell, idle.pid())["processes"][0]["causes"], Value::Array(Vec::new()));
    fs::remove_file(&copy).unwrap();
    has_cause(&shell, &idle, "replaced", "was replaced since", "Restart it");
    // A program that installs a filter itself stays on TCP, whatever the filter allows.
    let filtered = shell.path("filtered");
    let source = "#include <linux/filter.h>\n#include <linux/seccomp.h>\n#include <sys/prctl.h>\n#include <unistd.h>\n\
        int main(void) {\n\
            struct sock_filter all = {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW};\n\
            struct sock_fprog program = {1, &all};\n\
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);\n\
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);\n\
            write(1, \"up\", 2);\n\
            pause();\n\
        }";
    compile(&filtered, source, &[]);
    let idle = Idle::start(under_shunt(&shell, &[filtered.to_str().unwrap()]));
    has_cause(&shell, &idle, "sandboxed", "seccomp", "");
}

/// A program that starts another one under a filter, as systemd does for a hardened unit. With an
/// argument "refuse", there are no Unix sockets.
const FILTERING: &str = "#include <errno.h>\n#include <linux/filter.h>\n#include <linux/seccomp.h>\n#include <stddef.h>\n\
    #include <string.h>\n#include <sys/prctl.h>\n#include <sys/socket.h>\n#include <sys/syscall.h>\n#include <unistd.h>\n\
    int main(int count, char **words) {\n\
        int error = strcmp(words[1], \"refuse\") ? SECCOMP_RET_ALLOW : SECCOMP_RET_ERRNO | EAFNOSUPPORT;\n\
        struct sock_filter code[] = {\n\
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),\n\
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),\n\
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args)),\n\
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 1),\n\
            BPF_STMT(BPF_RET | BPF_K, error),\n\
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};\n\
        struct sock_fprog program = {6, code};\n\
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);\n\
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);\n\
        execvp(words[2], words + 2);\n\
        return 127;\n\
    }";

/// Exchanges bytes with itself, and then waits.
const TALK: &str = "import signal, socket, sys\n\
    listener = socket.create_server(('127.0.0.1', 0))\n\
    one = socket.create_connection(listener.getsockname())\n\
    other = listener.accept()[0]\n\
    for _ in range(500):\n    one.send(b'x'), other.recv(1)\n\
    sys.stdout.write('up')\nsys.stdout.flush()\nsignal.pause()\n";

#[test]
fn a_filter_is_a_cause_only_if_it_keeps_the_shim_from_the_broker() {
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let (filtering, idle) = (shell.path("filtering"), compiled(&shell, "idle", &[]));
    compile(&filtering, FILTERING, &[]);
    let start = |filter: &str, command: &[&str]| {
        Idle::start(under_shunt(&shell, &[&[filtering.to_str().unwrap(), filter], command].concat()))
    };
    // Such a program has not been refused anything yet.
    for filter in ["allow", "refuse"] {
        let idle = start(filter, &[idle.to_str().unwrap()]);
        let causes = &explain(&shell, idle.pid())["processes"][0]["causes"];
        assert_eq!(*causes, Value::Array(Vec::new()), "{filter}");
    }
    let talk = shell.file("talk.py", TALK);
    let talk = ["python3", talk.to_str().unwrap()];
    let talking = start("allow", &talk);
    assert_eq!(explain(&shell, talking.pid())["processes"][0]["causes"], Value::Array(Vec::new()));
    let refused = start("refuse", &talk);
    has_cause(&shell, &refused, "seccomp", "(Address family not supported", "AF_UNIX");
}

/// The broker of a program is the one that its shim looks for, whatever its environment says.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_broker_of_a_program_that_was_entered_or_has_overwritten_its_environment() {
    let shell = Shell::new();
    let other = shell.path("other.sock");
    let mut daemon = shell.shunt(["daemon", "--socket"]);
    daemon.arg(&other);
    let daemon = Running::start(daemon);
    let is_there = || Ended::of(shell.shunt(["status", "--broker", other.to_str().unwrap()])).code == Some(0);
    eventually("the broker listens", is_there);
    let mut command = Command::new(compiled(&shell, "idle", &[]));
    command.env("XDG_RUNTIME_DIR", shell.path("none"));
    let idle = Idle::start(command);
    let mut attach = shell.shunt(["attach", "--broker", other.to_str().unwrap()]);
    attach.arg(idle.pid().to_string());
    let attached = Ended::of(attach);
    assert_eq!(attached.code, Some(0), "{attached:?}");
    let process = |pid: u32| explain(&shell, pid)["processes"][0].clone();
    let entered = process(idle.pid());
    assert_eq!(entered["broker"], *other.to_str().unwrap(), "{entered:#}");
    assert_eq!(entered["causes"], Value::Array(Vec::new()), "{entered:#}");
    // As programs do that set a title for the process list.
    let overwrites = shell.path("overwrites");
    compile(
        &overwrites,
        "#include <string.h>\n#include <unistd.h>\n\
         int main(int count, char **words, char **environment) {\n\
             char *last = *environment;\n\
             for (char **one = environment; *one; one++) last = *one + strlen(*one);\n\
             memset(*environment, 0, last - *environment);\n\
             write(1, \"up\", 2);\n pause();\n}",
        &[],
    );
    let mut command = shell.shunt(["run", "--broker", other.to_str().unwrap(), "--"]);
    command.arg(&overwrites);
    let idle = Idle::start(command);
    let overwritten = process(idle.pid());
    assert_eq!(overwritten["broker"], *other.to_str().unwrap(), "{overwritten:#}");
    drop(daemon);
}

#[test]
fn a_program_with_a_ring_that_the_kernel_polls() {
    let shell = Shell::new();
    let program = shell.path("ring");
    let source = "#include <liburing.h>\n#include <unistd.h>\nint main(void) { struct io_uring ring;\n\
        if (io_uring_queue_init(4, &ring, IORING_SETUP_SQPOLL)) return 1; write(1, \"up\", 2); pause(); }";
    compile(&program, source, &["-Wl,--no-as-needed", "-luring"]);
    let idle = Idle::start(under_shunt(&shell, &[program.to_str().unwrap()]));
    has_cause(&shell, &idle, "io_uring", "cannot be seen", "epoll");
}

/// The beginning of servers in C. Makes a listening socket, writes its port to a file, and prints
/// that the server is up.
const LISTENING: &str = r#"
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
static int listening(const char *file)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, len) || listen(listener, 8) || getsockname(listener, (struct sockaddr *)&at, &len))
        exit(1);
    FILE *port = fopen(file, "w");
    fprintf(port, "%d", ntohs(at.sin_port));
    fclose(port);
    write(1, "up", 2);
    return listener;
}
"#;

/// A server that accepts, reads and writes by io_uring.
const RING: &str = r#"
#include <liburing.h>
static struct io_uring ring;
static int done(void)
{
    struct io_uring_cqe *cqe;
    io_uring_submit_and_wait(&ring, 1);
    if (io_uring_peek_cqe(&ring, &cqe)) return -1;
    int result = cqe->res;
    io_uring_cqe_seen(&ring, cqe);
    return result;
}
int main(int count, char **words)
{
    char bytes[256];
    if (io_uring_queue_init(8, &ring, 0)) return 1;
    int listener = listening(words[1]);
    for (;;) {
        io_uring_prep_accept(io_uring_get_sqe(&ring), listener, NULL, NULL, 0);
        int connection = done();
        for (;;) {
            io_uring_prep_recv(io_uring_get_sqe(&ring), connection, bytes, sizeof bytes, 0);
            int got = done();
            if (got <= 0) break;
            io_uring_prep_send(io_uring_get_sqe(&ring), connection, bytes, got, 0);
            done();
        }
        close(connection);
    }
}
"#;

/// Starting the server under shunt changes nothing: it is under shunt.
#[test]
fn the_client_of_a_server_with_a_ring() {
    let shell = Shell::new();
    let (program, port_file) = (shell.path("ring"), shell.path("port"));
    compile(&program, &[LISTENING, RING].concat(), &["-Wl,--no-as-needed", "-luring"]);
    let words = [program.to_str().unwrap(), port_file.to_str().unwrap()];
    let server = Idle::start(under_shunt(&shell, &words));
    let port = fs::read_to_string(&port_file).unwrap();
    let script = shell.file("ping.py", PING);
    let words = ["python3", script.to_str().unwrap(), "client", &port, "busy"];
    let client = Idle::start(under_shunt(&shell, &words));
    let report = explain(&shell, client.pid());
    let connection = &report["processes"][0]["connections"][0];
    let causes = connection["causes"].as_array().unwrap();
    let labels: Vec<_> = causes.iter().map(|cause| &cause["label"]).collect();
    assert_eq!(labels, ["peer_not_offered", "io_uring"], "{report:#}");
    for cause in causes {
        let advice = cause["advice"].as_str().unwrap();
        assert!(!advice.contains("shunt run"), "it is under shunt: {report:#}");
    }
    let explanation = causes[0]["explanation"].as_str().unwrap();
    assert!(explanation.contains("runs under shunt, but") && explanation.contains("io_uring"), "{report:#}");
    assert!(causes[1]["explanation"].as_str().unwrap().contains(&format!("(pid {})", server.pid())));
    let report = explain(&shell, server.pid());
    assert_eq!(report["processes"][0]["connections"][0]["causes"][0]["label"], "io_uring", "{report:#}");
    // The broker knows nothing of the server's end, so its text has all possibilities.
    let status = Ended::of(shell.shunt(["status"])).quietly(0).stdout;
    assert!(status.contains("peer_not_offered: ") && status.contains("as by io_uring"), "{status}");
}

/// No broker has accepted the program, so none has been lost, although the one that answers is younger.
#[test]
fn a_program_that_is_older_than_its_first_broker() {
    let shell = Shell::new();
    let begun = Instant::now();
    let idle = Idle::start(under_shunt(&shell, &[compiled(&shell, "idle", &[]).to_str().unwrap()]));
    eventually("it is older than the precision of /proc", || begun.elapsed() > Duration::from_secs(3));
    let pid = shell.broker_pid().unwrap().to_string();
    assert!(Command::new("kill").arg(&pid).status().unwrap().success());
    eventually("the broker ends", || shell.broker_pid().is_none());
    Ended::of(shell.shunt(["daemon", "--detach", "--idle-exit", "1"])).quietly(0);
    let report = explain(&shell, idle.pid());
    assert_eq!(report["processes"][0]["causes"], Value::Array(Vec::new()), "{report:#}");
}

#[test]
fn what_is_no_process_or_another_users() {
    needs_root();
    let shell = Shell::new();
    Ended::of(shell.shunt(["explain", "4194304"])).saying(1, &["there is no process 4194304"]);
    Ended::of(shell.shunt(["explain", "127.0.0.1:1"])).saying(1, &["no TCP socket", "that address"]);
    Ended::of(shell.shunt(["explain", "no-such-program"]))
        .saying(1, &["no-such-program", "command not found"]);
    assert_eq!(Ended::of(shell.shunt(["explain"])).code, Some(2));
    // The process is a zombie, because its parent has not waited.
    let mut child = Command::new("true").spawn().unwrap();
    let pid = child.id();
    eventually("it is a zombie", || {
        fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ")
    });
    let report = explain(&shell, pid);
    child.wait().unwrap();
    assert_eq!(report["processes"][0]["causes"][0]["label"], "ended", "{report:#}");
    // The process belongs to root. A user without privileges runs the command.
    let program = compiled(&shell, "idle", &[]);
    let idle = Idle::start(Command::new(program));
    let mut command = shell.for_everybody();
    command.args(["explain", "--json", &idle.pid().to_string()]).uid(NOBODY).gid(NOBODY);
    let ended = Ended::of(command).quietly(0);
    assert!(ended.stdout.contains("\"hidden\"") && ended.stdout.contains("belongs to user 0"), "{ended:?}");
}

#[test]
fn a_program_and_the_processes_that_run_it() {
    let shell = Shell::new();
    let program = compiled(&shell, "idle-by-name", &[]);
    let idle = Idle::start(Command::new(&program));
    for name in [program.to_str().unwrap(), "idle-by-name"] {
        let report = explain(&shell, name);
        let pids: Vec<_> = report["processes"].as_array().unwrap().iter().map(|one| &one["pid"]).collect();
        assert_eq!(pids, [&Value::from(idle.pid())], "{report:#}");
    }
    assert_eq!(explain(&shell, program.display())["file"]["can_be_entered"], true);
    let text = Ended::of(shell.shunt(["explain", program.to_str().unwrap()])).quietly(0).stdout;
    assert!(
        text.starts_with(&format!("{}: can run under shunt\nidle-by-name, pid ", program.display())),
        "{text}"
    );
}

/// A server that answers each byte, and a client that sends until its standard input ends.
const PING: &str = r#"
import ctypes, os, socket, sys, threading
def serve(connection):
    while data := connection.recv(1):
        connection.sendall(data)
if sys.argv[1] == "server":
    ctypes.CDLL(None).prctl(15, b"main-thread", 0, 0, 0)
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(1, b"up")
    open(sys.argv[2], "w").write(str(listener.getsockname()[1]))
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
else:
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    for turn in range(20 if sys.argv[3] == "busy" else 1):
        connection.sendall(b"x")
        connection.recv(1)
        threading.Event().wait(0.02)
    os.write(1, b"up")
    threading.Event().wait()
"#;

#[test]
fn a_connection_with_both_its_ends() {
    let shell = Shell::new();
    let script = shell.file("ping.py", PING);
    let script = script.to_str().unwrap();
    let port_file = shell.path("port");
    let server =
        Idle::start(under_shunt(&shell, &["python3", script, "server", port_file.to_str().unwrap()]));
    let port = || fs::read_to_string(&port_file).ok()?.parse::<u16>().ok();
    eventually("the port is written", || port().is_some());
    let port = port().unwrap();
    // There is no connection yet.
    let listening = explain(&shell, format!(":{port}"));
    assert_eq!(listening["processes"][0]["pid"], server.pid());
    assert_eq!(listening["processes"][0]["connections"], Value::Array(Vec::new()));

    let client = Idle::start(under_shunt(&shell, &["python3", script, "client", &port.to_string(), "busy"]));
    let report = explain(&shell, client.pid());
    let connection = &report["processes"][0]["connections"][0];
    assert_eq!((&connection["sends"], &connection["receives"]), (&"shm".into(), &"shm".into()), "{report:#}");
    assert_eq!(connection["peers"][0]["pid"], server.pid());
    // The thread has another name than its process.
    assert_eq!(connection["peers"][0]["program"], "python3");
    assert_eq!(connection["causes"], Value::Array(Vec::new()));
    let local = connection["local"].as_str().unwrap();
    // With an address, both ends are reported.
    let report = explain(&shell, local);
    assert_eq!(report["processes"].as_array().unwrap().len(), 2, "{report:#}");
    let text = Ended::of(shell.shunt(["explain", local])).quietly(0).stdout;
    assert!(text.contains(&format!("(pid {}): on shared memory\n", server.pid())), "{text}");
    drop(client);

    // The client uses another broker.
    let elsewhere = Shell::new();
    let words = ["python3", script, "client", &port.to_string(), "busy"];
    let client = Idle::start(under_shunt(&elsewhere, &words));
    let report = explain(&shell, client.pid());
    let causes = report["processes"][0]["connections"][0]["causes"].as_array().unwrap();
    assert!(causes.iter().any(|cause| cause["label"] == "two_brokers"), "{report:#}");
    let of_peer = causes.iter().find(|cause| cause["label"] == "peer_not_offered").unwrap();
    assert!(of_peer["advice"].as_str().unwrap().contains("advice for two_brokers"), "{report:#}");
    drop(client);

    // The client is not under shunt. Both ends report that.
    let mut command = Command::new("python3");
    command.args([script, "client", &port.to_string(), "busy"]);
    let client = Idle::start(command);
    let report = explain(&shell, server.pid());
    let connection = &report["processes"][0]["connections"][0];
    let labels: Vec<_> =
        connection["causes"].as_array().unwrap().iter().map(|cause| &cause["label"]).collect();
    assert_eq!(labels, ["peer_not_offered", "not_preloaded"], "{report:#}");
    let words = connection["causes"][1]["explanation"].as_str().unwrap();
    assert!(words.contains(&format!("The other end is python3 (pid {})", client.pid())), "{words}");
    let report = explain(&shell, client.pid());
    assert_eq!(report["processes"][0]["causes"][0]["label"], "not_preloaded", "{report:#}");
    drop(client);

    // A single byte is too little use for shared memory.
    let client = Idle::start(under_shunt(&shell, &["python3", script, "client", &port.to_string(), "idle"]));
    let report = explain(&shell, client.pid());
    let connection = &report["processes"][0]["connections"][0];
    assert_eq!(connection["causes"][0]["label"], "too_few_operations", "{report:#}");
}

/// A server that is linked with libc, but waits, reads and writes with its own system calls.
#[cfg(target_arch = "x86_64")]
const PAST_LIBC: &str = r#"
#include <sys/syscall.h>
static long call(long number, long first, long second, long third)
{
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(first), "S"(second), "d"(third) : "rcx", "r11", "memory");
    return result;
}
int main(int count, char **words)
{
    char byte;
    int listener = listening(words[1]);
    for (;;) {
        long connection = call(SYS_accept, listener, 0, 0);
        while (call(SYS_read, connection, (long)&byte, 1) == 1)
            call(SYS_write, connection, (long)&byte, 1);
        call(SYS_close, connection, 0, 0);
    }
}
"#;

/// The program has no unwind tables, so the boundaries of its functions are unknown and its system
/// calls are not found.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_program_whose_calls_are_not_seen() {
    let shell = Shell::new();
    let (program, port_file) = (shell.path("past-libc"), shell.path("port"));
    compile(&program, &[LISTENING, PAST_LIBC].concat(), &["-O1", "-w", "-fno-asynchronous-unwind-tables"]);
    let server = Idle::start(under_shunt(&shell, &[program.to_str().unwrap(), port_file.to_str().unwrap()]));
    let port = fs::read_to_string(&port_file).unwrap();
    let script = shell.file("ping.py", PING);
    let client =
        Idle::start(under_shunt(&shell, &["python3", script.to_str().unwrap(), "client", &port, "busy"]));
    let labels = |causes: &Value| -> Vec<String> {
        let all = causes.as_array().unwrap().iter();
        all.map(|cause| cause["label"].as_str().unwrap().to_owned()).collect()
    };
    let report = explain(&shell, server.pid());
    let causes = &report["processes"][0]["connections"][0]["causes"];
    // The cause must not be that the connection is hardly used, with the advice that nothing needs
    // to be done.
    assert_eq!(labels(causes), ["unseen_use"], "{report:#}");
    let report = explain(&shell, client.pid());
    let causes = &report["processes"][0]["connections"][0]["causes"];
    assert_eq!(labels(causes), ["peer_not_offered", "unseen_use"], "{report:#}");
    // The server already runs under shunt.
    let said = |cause: &Value, name: &str| cause[name].as_str().unwrap().to_owned();
    assert!(said(&causes[0], "explanation").contains("runs under shunt"), "{report:#}");
    assert!(!said(&causes[0], "advice").contains("shunt run"), "{report:#}");
    assert!(said(&causes[1], "explanation").contains("The other end is past-libc"), "{report:#}");
}

/// A process with both ends of a connection. It waits for them with an epoll instance.
const EVENTS: &str = r#"
import os, select, socket, sys, threading
def serve(connection):
    while data := connection.recv(1):
        connection.sendall(data)
listener = socket.create_server(("127.0.0.1", 0))
ours, others = os.pipe()
events = select.epoll()
if sys.argv[1] == "fork" and os.fork() == 0:
    # It has the set as long as its parent lives.
    os.close(others)
    os.read(ours, 1)
    os._exit(0)
threading.Thread(target=lambda: serve(listener.accept()[0]), daemon=True).start()
connection = socket.create_connection(listener.getsockname())
events.register(connection, select.EPOLLIN)
if sys.argv[1] == "option":
    connection.setsockopt(socket.SOL_SOCKET, 29, 1)
for turn in range(100):
    connection.sendall(b"x")
    events.poll()
    connection.recv(1)
open(sys.argv[2], "w").write(str(connection.getsockname()[1]))
os.write(1, b"up")
threading.Event().wait()
"#;

/// Returns the causes for the end of the connection that waits with epoll, and its line in
/// `status`.
fn of_events(shell: &Shell, how: &str) -> (Vec<(String, String)>, String) {
    let script = shell.file("events.py", EVENTS);
    let port_file = shell.path(how);
    let words = ["python3", script.to_str().unwrap(), how, port_file.to_str().unwrap()];
    let idle = Idle::start(under_shunt(shell, &words));
    let local = format!("127.0.0.1:{}", fs::read_to_string(&port_file).unwrap());
    let report = explain(shell, idle.pid());
    let connections = report["processes"][0]["connections"].as_array().unwrap();
    let connection = connections.iter().find(|one| one["local"] == *local).unwrap();
    let word = |cause: &Value, name: &str| cause[name].as_str().unwrap().to_owned();
    let causes = connection["causes"].as_array().unwrap().iter();
    let causes = causes.map(|cause| (word(cause, "label"), word(cause, "explanation"))).collect();
    let status = Ended::of(shell.shunt(["status"])).quietly(0).stdout;
    let row = |line: &&str| line.split_whitespace().nth(2) == Some(&*local);
    (causes, status.lines().find(row).unwrap_or_default().to_owned())
}

#[test]
fn a_connection_in_a_set_that_another_process_has_too() {
    let shell = Shell::new();
    let (causes, row) = of_events(&shell, "fork");
    assert_eq!(causes[0].0, "shared", "{causes:?}");
    assert!(row.ends_with("shared"), "{row:?}");
}

#[test]
fn a_connection_with_an_option_that_is_not_emulated() {
    let shell = Shell::new();
    let (causes, row) = of_events(&shell, "option");
    assert_eq!(causes[0].0, "socket_option", "{causes:?}");
    assert!(causes[0].1.ends_with(": SO_TIMESTAMP."), "{causes:?}");
    assert!(row.ends_with("socket_option (SO_TIMESTAMP)"), "{row:?}");
}
