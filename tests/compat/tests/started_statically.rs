//! Programs without a dynamic linker that are started by programs under shunt: by shells,
//! supervisors, make, Python, and other static programs. Their calls are redirected as in a program
//! that `shunt run` starts. Neither they nor their starters may notice it.

use shunt_compat::{
    Expected, Host, Launch, Mode, Way, both, compile, compile_for_musl, compile_go, converse,
    end_on_transport, find_program, gate,
};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(100);
const CONNECTIONS: usize = 4;
const MESSAGES: &str = "60";

/// An echo server and its client.
static ECHO: LazyLock<PathBuf> = LazyLock::new(|| compile_go(Path::new(env!("CARGO_TARGET_TMPDIR")), "echo"));

/// Runs a conversation of two Go programs. `start` returns the program that starts each of them
/// with the given arguments.
fn converse_in_go(start: fn(&Host) -> Launch<'_>) {
    let program = &*ECHO;
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let server = start(host).arg(program).args(["serve", &number]);
        let client = start(host).arg(program).args(["ask", &number, &count, MESSAGES, &gate(port)]);
        converse(host, (port, CONNECTIONS), (server, client), Way::Shm)
    });
}

/// Executes the program as the script of an entrypoint does.
#[test]
fn a_shell_becomes_the_program() {
    converse_in_go(|host| host.program("sh").args(["-c", "exec \"$0\" \"$@\""]));
}

#[test]
fn a_shell_starts_the_program() {
    const START: &str = "\"$0\" \"$@\" & trap \"kill $!\" TERM; wait";
    converse_in_go(|host| host.program("sh").args(["-c", START]));
}

/// A shell executes a static shell, whose system calls are redirected, and which starts a program.
#[test]
fn a_static_shell_starts_the_program() {
    const START: &str = "exec busybox sh -c '\"$0\" \"$@\" & trap \"kill $!\" TERM; wait' \"$0\" \"$@\"";
    converse_in_go(|host| host.program("sh").args(["-c", START]));
}

/// The starter's runtime creates a child by vfork between its goroutines.
#[test]
fn a_program_of_gos_starts_the_program() {
    let starter = compile_go(Path::new(env!("CARGO_TARGET_TMPDIR")), "starter");
    let program = &*ECHO;
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let start = || host.program(starter.to_string_lossy()).arg(program);
        let client = start().args(["ask", &number, &count, MESSAGES, &gate(port)]);
        converse(host, (port, CONNECTIONS), (start().args(["serve", &number]), client), Way::Shm)
    });
}

/// make starts commands that need no shell by posix_spawn. It would print its directory if it took
/// itself for a child of another make.
#[test]
fn make_starts_the_program() {
    both(LIMIT, |host| {
        compile_for_musl(host, "exchange", &["-static"]);
        host.write("Makefile", "run:\n\t@./exchange\n");
        let on_shm = || host.status().map(|status| status.totals.share.on_shm);
        let before = on_shm();
        let printed = host.program("make").args(["--no-print-directory", "run"]).run("make", LIMIT).stdout;
        assert!(before.is_none() || on_shm() > before, "nothing was on shared memory");
        printed
    });
}

/// The supervisor restarts a program that has ended.
#[test]
fn a_supervisor_starts_the_program_again() {
    let program = &*ECHO;
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let again = "trap 'kill $child; exit' TERM
            while :; do \"$0\" \"$@\" & child=$!; echo $child > child.new; mv child.new child; wait $child; done";
        let supervisor =
            host.program("sh").args(["-c", again]).arg(program).args(["serve", &number]).start("supervisor");
        let mut said = Vec::new();
        for turn in 0..3 {
            host.wait_for_port(port);
            let transport = host.watch_transport();
            let gate = format!("{}.{turn}", gate(port));
            let client = host
                .program(program.to_string_lossy())
                .args(["ask", &number, &count, MESSAGES, &gate])
                .start("client");
            let expected = Expected { port, connections: CONNECTIONS, share: 0.9 };
            said.push(end_on_transport(host, &transport, (client, &gate), &[expected]));
            kill(&read(&host.path("child")));
        }
        supervisor.stop();
        said
    });
}

fn kill(child: &str) {
    let pid = child.trim().parse().ok().and_then(rustix::process::Pid::from_raw).expect("a number");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
    let deadline = Instant::now() + Duration::from_secs(10);
    while Path::new(&format!("/proc/{}", child.trim())).exists() {
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()))
}

/// The number of ways in which `starts.py` starts a program.
const WAYS: usize = 8;

/// Checks whether all programs were entered, or none, under shunt.
fn assert_entered(host: &Host, files: impl IntoIterator<Item = String>, expected: bool) {
    for file in files {
        let found = read(&host.path(&file));
        let expected = if expected && host.mode() == Mode::Shunt { "entered" } else { "not entered" };
        assert_eq!(found, expected, "{file}");
    }
}

fn started_in_each_way(compile: fn(&Host), is_entered: bool, user: Option<&'static str>) {
    both(LIMIT, move |host| {
        compile(host);
        let mut python = host.script("python3", "starts.py");
        if let Some(user) = user {
            python = python.user(user);
        }
        start_in_each_way(host, python, is_entered)
    });
}

/// Creates the directory `told`, in which every user may write.
fn open_directory(host: &Host) {
    let directory = host.path("told");
    std::fs::create_dir(&directory).expect("own directory");
    std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).expect("own directory");
}

/// Runs `starts.py`, and returns its output. `python` is the beginning of its command.
fn start_in_each_way(host: &Host, python: Launch, is_entered: bool) -> String {
    open_directory(host);
    let files: Vec<String> = (0..WAYS).map(|way| format!("told/{way}")).collect();
    let printed = python.arg(host.path("born")).args(&files).run("python", LIMIT).stdout;
    assert_entered(host, files, is_entered);
    printed
}

/// Returns a command that uses a script as the ptrace helper in place of `shunt`, or no helper.
fn beside<'host>(host: &'host Host, script: Option<&str>) -> Launch<'host> {
    compile(host, "born", &["-static"]);
    let path = host.path("beside");
    if let Some(script) = script {
        host.write("beside", script);
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("own file");
    }
    host.program("env").arg(format!("SHUNT_INTERCEPT={}", path.display()))
}

fn started_beside(script: Option<&'static str>) {
    both(LIMIT, move |host| {
        let starts = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/starts.py");
        let python = beside(host, script).arg(find_program("python3")).arg(starts);
        start_in_each_way(host, python, false)
    });
}

/// Without a helper, as in a chroot.
#[test]
fn nothing_is_found_to_be_started_beside() {
    started_beside(None);
}

#[test]
fn what_is_started_beside_ends_at_once() {
    started_beside(Some("#!/bin/sh\n"));
}

/// The helper ends early, as if it was killed.
#[test]
fn what_is_started_beside_ends_before_the_program_is_executed() {
    started_beside(Some("#!/bin/sh\necho ready\n"));
}

/// The kernel does not execute a file that is open for writing, and the helper keeps it open. A
/// host's security policy may likewise refuse the exec of a traced process.
#[test]
fn a_program_that_cannot_be_executed_with_somebody_beside() {
    const WRITER: &str = "#!/bin/sh\nexec 3<>\"$6\"\necho ready\nwhile read -r line; do :; done\n";
    both(LIMIT, |host| {
        let shell = beside(host, Some(WRITER)).args(["sh", "-c", "exec ./born born.told"]);
        let ended = shell.start("shell").wait(LIMIT);
        assert_eq!(ended.status.code(), Some(7), "{}", ended.stderr);
        assert_entered(host, ["born.told".to_owned()], false);
        ended.stdout
    });
}

/// A limit leaves no room for another process or thread while the helper runs, which has a thread.
/// The user has no other processes and no name.
#[test]
fn a_program_that_has_no_room_with_somebody_beside() {
    const USER: &str = "setpriv --reuid=3456789 --regid=3456789 --clear-groups \"$@\"";
    const LIMITER: &str = "
import resource, sys, threading, time
threading.Thread(target=time.sleep, args=(100,)).start()
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
resource.prlimit(int(sys.argv[5]), resource.RLIMIT_NPROC, (3, most))
print('ready', flush=True)
time.sleep(100)
";
    const START: &str = "import os, sys
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))";
    both(LIMIT, |host| {
        open_directory(host);
        let limiter = format!("#!{} -IS{LIMITER}", find_program("python3").display());
        let shell = beside(host, Some(&limiter)).args(["sh", "-c", USER, "sh"]);
        let python = shell.arg(find_program("python3")).args(["-c", START, "./born", "told/born"]);
        let printed = python.run("python", LIMIT).stdout;
        assert_entered(host, ["told/born".to_owned()], false);
        printed
    });
}

#[test]
fn what_it_and_its_parent_see() {
    started_in_each_way(|host| drop(compile(host, "born", &["-static"])), true, None);
}

#[test]
fn what_it_and_its_parent_see_with_musl() {
    started_in_each_way(|host| drop(compile_for_musl(host, "born", &["-static-pie", "-fPIE"])), true, None);
}

#[test]
fn what_it_and_its_parent_see_as_another_user() {
    started_in_each_way(|host| drop(compile(host, "born", &["-static"])), true, Some("daemon"));
}

/// A setuid program is never traced, because tracing would prevent the change of its user.
#[test]
fn a_setuid_program_is_left_alone() {
    fn compile_setuid(host: &Host) {
        let program = compile(host, "born", &["-static"]);
        std::fs::set_permissions(program, Permissions::from_mode(0o4755)).expect("own file");
    }
    started_in_each_way(compile_setuid, false, Some("daemon"));
}

/// A program under strace behaves as without shunt: no helper is started for it, and only strace
/// traces it.
#[test]
fn a_program_that_is_traced_is_left_alone() {
    both(LIMIT, |host| {
        compile(host, "born", &["-static"]);
        let strace = host.program("strace").args(["-f", "-qq", "-e", "trace=execve", "-o", "executed"]);
        let ended =
            strace.args(["sh", "-c", "./born born.told; ./born born.again"]).start("strace").wait(LIMIT);
        assert_eq!(ended.status.code(), Some(7), "{}", ended.stderr);
        assert_entered(host, ["born.told", "born.again"].map(str::to_owned), false);
        let executed = read(&host.path("executed"));
        let is_done = |line: &&str| line.contains("execve(") && line.ends_with("= 0");
        executed.lines().filter(is_done).count()
    });
}

/// The dynamic linker still loads the shim into a dynamic program that a static one starts.
#[test]
fn a_dynamic_program_of_a_static_one() {
    both(LIMIT, |host| {
        compile(host, "born", &[]);
        let busybox = find_program("busybox");
        let start = "./born born.told; exec ./born born.again";
        let started = host.program(busybox.to_string_lossy()).args(["sh", "-c", start]);
        let ended = started.start("busybox").wait(LIMIT);
        assert_eq!(ended.status.code(), Some(7), "{}", ended.stderr);
        assert_entered(host, ["born.told", "born.again"].map(str::to_owned), true);
        ended.stdout
    });
}
