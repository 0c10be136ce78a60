//! Starts and ends programs. Each has its output in files of the host's directory and a process
//! group for itself. It receives SIGTERM when the thread that started it ends.

use crate::ground::{parse_pid, signal_group, stat_field};
use crate::host::{Host, Mode};
use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Checks for the end of a child without reaping it.
const PEEK: WaitIdOptions = WaitIdOptions::EXITED.union(WaitIdOptions::NOWAIT).union(WaitIdOptions::NOHANG);

/// The maximum time in which a program must end after it was asked to.
const GRACE: Duration = Duration::from_secs(20);

/// A program about to be started.
#[derive(Debug)]
pub struct Launch<'h> {
    host: &'h Host,
    program: PathBuf,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    user: Option<String>,
    cpu: Option<usize>,
    native: bool,
    run_arguments: Vec<OsString>,
    stop_signal: Signal,
    input: Option<PathBuf>,
}

impl<'h> Launch<'h> {
    pub(crate) fn new(host: &'h Host, program: PathBuf) -> Launch<'h> {
        Launch {
            host,
            program,
            arguments: Vec::new(),
            variables: Vec::new(),
            user: None,
            cpu: None,
            native: host.mode() == Mode::Native,
            run_arguments: Vec::new(),
            stop_signal: Signal::TERM,
            input: None,
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Adds the words of `line` as arguments.
    pub fn words(self, line: &str) -> Self {
        self.args(line.split_whitespace())
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.variables.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Runs the program as another user, if root runs the tests.
    pub fn user(mut self, name: &str) -> Self {
        self.user = rustix::process::geteuid().is_root().then(|| name.to_owned());
        self
    }

    /// Pins the program to one CPU.
    pub fn cpu(mut self, cpu: usize) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// Runs the program without shunt, whatever the host's mode.
    pub fn native(mut self) -> Self {
        self.native = true;
        self
    }

    /// Adds flags for `shunt run`; without effect on a native host.
    pub fn shunt_args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.run_arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Makes [`Program::stop`] use SIGINT instead of SIGTERM.
    pub fn stopped_by_interrupt(mut self) -> Self {
        self.stop_signal = Signal::INT;
        self
    }

    /// Reads the program's standard input from a file.
    pub fn input(mut self, path: PathBuf) -> Self {
        self.input = Some(path);
        self
    }

    /// Starts the program.
    pub fn start(self, name: &str) -> Program {
        // `setpriv` and `taskset` execute the program in their own process, so the process id stays
        // valid.
        let mut line: Vec<OsString> = ["setpriv", "--pdeathsig", "TERM"].map(OsString::from).into();
        if let Some(user) = &self.user {
            line.extend(["--reuid", user, "--regid", user, "--init-groups"].map(OsString::from));
        }
        line.push("--".into());
        if let Some(cpu) = self.cpu {
            line.extend(["taskset", "--cpu-list", &cpu.to_string()].map(OsString::from));
        }
        if let (false, Some(tools)) = (self.native, self.host.tools()) {
            line.extend([tools.shunt.clone().into(), "run".into(), "--broker".into()]);
            line.push(self.host.broker_socket().into());
            line.extend(self.run_arguments);
            line.push("--".into());
        }
        line.push(self.program.into());
        line.extend(self.arguments);

        let stdout = self.host.path(&format!("{name}.stdout"));
        let stderr = self.host.path(&format!("{name}.stderr"));
        let create = |path: &Path| File::create(path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let input = match &self.input {
            Some(path) => File::open(path).expect("the test wrote it").into(),
            None => Stdio::null(),
        };
        let child = Command::new(&line[0])
            .args(&line[1..])
            .envs(self.variables)
            .current_dir(self.host.dir())
            .stdin(input)
            .stdout(create(&stdout))
            .stderr(create(&stderr))
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("starting {name}: {error}"));
        self.host.ground().note_group(child.id());
        Program { name: name.to_owned(), child, stdout, stderr, stop_signal: self.stop_signal, ended: None }
    }

    /// Starts the program and waits for its end within `limit`. Panics if it fails.
    pub fn run(self, name: &str, limit: Duration) -> Finished {
        let finished = self.start(name).wait(limit);
        assert!(
            finished.success(),
            "{name} ended with {}\n--- stdout\n{}\n--- stderr\n{}",
            finished.status,
            finished.stdout,
            finished.stderr
        );
        finished
    }
}

/// A program that was started. Dropping it ends the program.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
    stop_signal: Signal,
    ended: Option<ExitStatus>,
}

impl Program {
    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns `true` if the program has not ended. Does not reap it, so its processor time can
    /// still be read.
    pub fn is_running(&self) -> bool {
        self.ended.is_none() && matches!(waitid(WaitId::Pid(parse_pid(self.pid())), PEEK), Ok(None))
    }

    /// Returns the program's standard output so far.
    pub fn output(&self) -> String {
        read(&self.stdout)
    }

    /// Waits until the program has printed `text`.
    pub fn wait_for_output(&mut self, text: &str, limit: Duration) {
        let deadline = Instant::now() + limit;
        while !self.output().contains(text) {
            assert!(self.is_running(), "{} ended before it said {text:?}\n{}", self.name, read(&self.stderr));
            assert!(Instant::now() < deadline, "{} did not say {text:?} within {limit:?}", self.name);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the end of the program, for at most `limit`.
    pub fn wait(mut self, limit: Duration) -> Finished {
        let deadline = Instant::now() + limit;
        while self.poll().is_none() {
            assert!(
                Instant::now() < deadline,
                "{} did not end within {limit:?}; {}\n{}",
                self.name,
                self.whereabouts(),
                read(&self.stderr)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        self.finished()
    }

    /// Waits for the end of the program. Also returns the processor time that it used, user and
    /// system.
    pub fn wait_with_cpu(self, limit: Duration) -> (Finished, Duration) {
        let deadline = Instant::now() + limit;
        while self.is_running() {
            assert!(Instant::now() < deadline, "{} did not end within {limit:?}", self.name);
            std::thread::sleep(Duration::from_millis(2));
        }
        let cpu = self.cpu();
        (self.wait(GRACE), cpu)
    }

    /// Returns the processor time that all threads have used so far, user and system.
    pub fn cpu(&self) -> Duration {
        let ticks = |field| stat_field(self.pid(), field).and_then(|text| text.parse::<u64>().ok());
        let total = ticks(11).unwrap_or(0) + ticks(12).unwrap_or(0);
        Duration::from_secs_f64(total as f64 / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Asks the program to end, and waits until it has.
    pub fn stop(mut self) -> Finished {
        self.end();
        self.finished()
    }

    /// Sends a signal to the program.
    pub fn signal(&mut self, signal: Signal) {
        if self.is_running() {
            let _ = kill_process(parse_pid(self.pid()), signal);
        }
    }

    /// Kills the program with SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        if self.poll().is_none() {
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
        }
    }

    fn poll(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("our own child");
        }
        self.ended
    }

    fn end(&mut self) {
        if self.poll().is_some() {
            return;
        }
        self.signal(self.stop_signal);
        let deadline = Instant::now() + GRACE;
        while self.poll().is_none() {
            if Instant::now() > deadline {
                eprintln!("{} did not end when asked to; {}", self.name, self.whereabouts());
                signal_group(self.pid(), Signal::KILL);
                self.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the kernel functions in which the threads sleep, for failure messages.
    fn whereabouts(&self) -> String {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        let place = |task: fs::DirEntry| fs::read_to_string(task.path().join("wchan")).unwrap_or_default();
        let places: Vec<_> = tasks.take(8).map(place).collect();
        format!("its threads sleep in {}", places.join(", "))
    }

    fn finished(&self) -> Finished {
        let status = self.ended.expect("called after its end");
        Finished { status, stdout: read(&self.stdout), stderr: read(&self.stderr) }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
    }
}

/// The result of a program that has ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The exit status.
    pub status: ExitStatus,
    /// The standard output.
    pub stdout: String,
    /// The standard error output.
    pub stderr: String,
}

impl Finished {
    /// Returns `true` if the program has exited with 0.
    pub fn success(&self) -> bool {
        self.status.success()
    }
}

fn read(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// Returns the last lines of every output file in `dir`.
pub(crate) fn tails(dir: &Path) -> String {
    let mut files: Vec<_> = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    files.sort();
    let mut all = String::new();
    for file in files {
        if !file.extension().is_some_and(|extension| extension == "stdout" || extension == "stderr") {
            continue;
        }
        let text = read(&file);
        let lines: Vec<_> = text.lines().collect();
        if !lines.is_empty() {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let tail = lines[lines.len().saturating_sub(15)..].join("\n");
            all.push_str(&format!("--- {name}\n{tail}\n"));
        }
    }
    all
}
