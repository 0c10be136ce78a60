//! The registry of subcommands and flags. The parser, the help, the manual pages and the
//! completions are all generated from it.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use shunt_abi::geometry::{Geometry, MAX_RING_BYTES, MIN_RING_BYTES};
use shunt_bench_args::Bench;

use crate::filter::Filter;

/// Takes TCP connections off the general path: unmodified programs, the same addresses, shared
/// memory beneath
#[derive(Debug, Parser)]
#[command(name = "shunt", version, arg_required_else_help = true, max_term_width = 100)]
#[command(after_help = "Start with: shunt run -- PROGRAM, once for the server and once for the client.\n\
    `shunt status` shows which transport each connection takes, `shunt explain` why, and `shunt doctor` what this \
    machine supports.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program under shunt
    Run(RunArgs),
    /// Enter a program that runs already: its new connections may use shared memory
    Attach(AttachArgs),
    /// End shunt's work in a running program: its connections go on by TCP
    Detach(DetachArgs),
    /// Run the broker, in the foreground by default
    Daemon(DaemonArgs),
    /// Show live connections: their programs, their transports, and why some are on TCP
    Status(StatusArgs),
    /// Show live what programs move, and by which transport
    Top(TopArgs),
    /// Write down what goes by shared memory as packets, for Wireshark and tshark
    Capture(CaptureArgs),
    /// Say why a process, a connection or a program is or is not on shared memory, and what to do
    /// about it
    Explain(ExplainArgs),
    /// Say what this machine supports, what it lacks and what to do about it
    Doctor(DoctorArgs),
    /// Write one file with what others need to look into a problem
    Bugreport(BugreportArgs),
    /// Show what is configured and where that stands, or check a file
    #[command(subcommand)]
    Config(Config),
    /// Run a relay between two sites, or talk to one that runs
    Relay(RelayArgs),
    /// Run a service in the kernel or in user space, or make one, or talk to one that runs
    Serve(ServeArgs),
    /// Connect containers of two hosts over the host network, under their overlay addresses
    #[command(subcommand)]
    Overlay(Overlay),
    /// Have Docker start containers under shunt: docker run --runtime=shunt
    #[command(subcommand)]
    Runtime(Runtime),
    /// Have a service of systemd run under shunt, or no longer
    #[command(subcommand)]
    Service(Service),
    /// Compare the transports side by side, with what each gives and costs
    #[command(subcommand)]
    Bench(Bench),
    /// Write a page about what shunt gains here: for a server and a load of yours, or for programs
    /// that many use
    Report(shunt_bench_args::report::Arguments),
    /// Put libshunt.so into a program without a dynamic linker: for `shunt run`, and for
    /// libshunt.so
    #[command(hide = true)]
    Intercept(InterceptArgs),
    /// Write the manual pages to a directory
    Man {
        /// Where to write them; it is created if it does not exist
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Print the completions of a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
#[command(
    override_usage = "shunt run [OPTIONS] [--] CMD [ARG]...",
    after_help = "CMD replaces shunt: its exit code and its signals are its own. If it cannot be entered (32-bit, \
        setuid) or no broker can be had, it still runs, on TCP, and one line on standard error \
        says so.\n\n\
        Exit codes of shunt itself: 2 wrong flags, 126 CMD cannot be executed, 127 CMD not found."
)]
pub(crate) struct RunArgs {
    /// Which transport connections may take [default: what the configuration says, else auto]
    #[arg(long, value_enum, env = shunt_abi::env::TRANSPORT)]
    pub(crate) transport: Option<Transport>,

    /// How long a thread looks for work before it sleeps: auto, off, or microseconds [default: what
    /// the configuration says, else auto]
    #[arg(long, value_name = "auto|off|USECS", value_parser = parse_spin, env = shunt_abi::env::SPIN)]
    pub(crate) spin: Option<String>,

    /// When a connection is offered to the broker, to be put on shared memory [default: what the
    /// configuration says, else used]
    #[arg(long, value_enum, env = shunt_abi::env::OFFER)]
    pub(crate) offer: Option<Offer>,

    /// What to do where the program's code may make system calls past libc, which shunt does not
    /// see [default: what the configuration says, else avoid]
    #[arg(long, value_enum, env = shunt_abi::env::OWN_CALLS)]
    pub(crate) own_calls: Option<OwnCalls>,

    /// How much memory the rings may have that a program writes: auto, or MiB. Auto is an eighth of
    /// the machine's memory, 256 MiB at the most
    /// [default: what the configuration says, else auto]
    #[arg(long, value_name = "auto|MIB", value_parser = parse_ring_memory, env = shunt_abi::env::RING_MEMORY)]
    pub(crate) ring_memory: Option<String>,

    /// Use the broker at this socket and no other [default: the user's, else the system's, else one
    /// is started]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    /// The program and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true, allow_hyphen_values = false)]
    #[arg(value_hint = clap::ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "All threads of the program are stopped for some milliseconds. Its connections, also those that it has\n\
        already, may use shared memory when the program at the other end is under shunt too. Processes that it\n\
        forks later are under shunt too; programs that it executes later are not.\n\n\
        It must be a program with glibc 2.34 or later, on x86-64, without a seccomp filter. You need the right\n\
        to trace it: run this as root, or as its user."
)]
pub(crate) struct AttachArgs {
    /// Use the broker at this socket and no other [default: the user's, else the system's, else one
    /// is started]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    /// The process id of the program
    #[arg(value_name = "PID")]
    pub(crate) pid: u32,
}

#[derive(Debug, Args)]
#[command(
    after_help = "It does not matter whether `shunt run` or `shunt attach` has put shunt into the program. shunt cannot\n\
        enter it again: restart it for that."
)]
pub(crate) struct DetachArgs {
    /// The process id of the program
    #[arg(value_name = "PID")]
    pub(crate) pid: u32,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct InterceptArgs {
    /// Who becomes the program, and is waited for; else another process does that, and this one
    /// ends
    #[arg(long, value_enum)]
    pub(crate) beside: Option<WaitsFor>,
    /// The thread that executes the program, or starts it
    pub(crate) thread: i32,
    /// Its process
    pub(crate) process: i32,
    /// The program's file
    pub(crate) program: PathBuf,
    /// libshunt.so
    pub(crate) library: PathBuf,
}

/// What `--beside` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WaitsFor {
    /// The thread itself
    Thread,
    /// The next child that it makes
    Child,
}

/// The transports that `--transport` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// The shortest transport there is: shared memory where both ends can use it, TCP elsewhere
    Auto,
    /// Shared memory or TCP, and no transport that a later version may add to auto
    Shm,
    /// TCP only; no broker is needed
    Tcp,
}

impl Transport {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
        }
    }
}

/// The moments that `--offer` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Offer {
    /// After a few operations, more where connections have been short or the peer may be far away
    Used,
    /// At its first use, however short it may be: for tests, as it costs more than short
    /// connections gain
    AtOnce,
}

impl Offer {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Offer::Used => "used",
            Offer::AtOnce => "at-once",
        }
    }
}

/// What `--own-calls` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OwnCalls {
    /// The program stays on TCP: such a call could meet what shunt keeps in a socket or an epoll
    /// instance
    Avoid,
    /// You know that its own system calls concern none of its connections, nor what it waits for
    /// them with
    Trust,
}

impl OwnCalls {
    pub(crate) fn label(self) -> &'static str {
        match self {
            OwnCalls::Avoid => "avoid",
            OwnCalls::Trust => "trust",
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    /// Serve every user of this host, at the system's socket, instead of this user only
    #[arg(long)]
    pub(crate) system: bool,

    /// Listen here instead of at the default place
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Exit after this many seconds without a program [default: what the configuration says, else
    /// never]
    #[arg(long, value_name = "SECS", value_parser = parse_idle_exit)]
    pub(crate) idle_exit: Option<u64>,

    /// Bytes of one direction's ring: a power of two, from a page to 16 MiB [default: what the
    /// configuration says, else 256 KiB]
    #[arg(long, value_name = "N", value_parser = parse_ring_bytes)]
    pub(crate) ring_bytes: Option<usize>,

    /// Serve what is counted for Prometheus here, at /metrics, as on 127.0.0.1:9441 [default: what
    /// the configuration says, else nowhere]
    #[arg(long, value_name = "ADDR", value_parser = parse_metrics)]
    pub(crate) metrics: Option<SocketAddr>,

    /// Let the metrics have the latency of requests. Programs measure it while the metrics are read,
    /// which takes time of them [default: what the configuration says, else they do not]
    #[arg(long)]
    pub(crate) latency: bool,

    /// Where the overlay's router publishes its policy, beside its control socket
    #[arg(long, value_name = "PATH", default_value = shunt_broker::OVERLAY_POLICY)]
    pub(crate) overlay_policy: PathBuf,

    /// Start in the background, and return when the broker accepts programs
    #[arg(long)]
    pub(crate) detach: bool,

    /// Append the log to this file instead of writing it to standard error
    #[arg(long, value_name = "PATH", env = LOG_FILE)]
    pub(crate) log_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Count the connections of each program instead of listing them
    #[arg(long)]
    pub(crate) summary: bool,

    /// Have the programs measure for two seconds how long they wait for answers, and print that
    #[arg(long)]
    pub(crate) latency: bool,

    #[command(flatten)]
    pub(crate) filter: Filter,

    /// Print what is shown, and all that the broker has counted, as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Ask the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) control: OverlayControl,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Keys: Tab programs or connections, arrows select, Enter details, s sort, r reverse, / filter, l latency, \
        space pause, h help, q quit."
)]
pub(crate) struct TopArgs {
    /// What a row is of
    #[arg(long, value_enum, default_value = "programs")]
    pub(crate) rows: crate::top::Rows,

    /// What rows are sorted by
    #[arg(long, value_enum, default_value = "rate")]
    pub(crate) sort: crate::top::Sort,

    /// Sort in the opposite direction
    #[arg(long)]
    pub(crate) reverse: bool,

    /// Show only rows with this in a name, a pid, an address or a reason; capitals and small letters
    /// are the same
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,

    #[command(flatten)]
    pub(crate) only: Filter,

    /// Show the latency of connections from the start, as after the key l
    #[arg(long)]
    pub(crate) latency: bool,

    /// Look again after so many seconds
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = parse_interval)]
    pub(crate) interval: f64,

    /// End after so many looks [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,

    /// Print each look as a line of JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Ask the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Of each kind of filter that is given, one must fit either end. It ends by Ctrl-C, and says what it has missed. Root of the \
    host sees everything, others what goes between programs of their own (see docs/capture.md)."
)]
pub(crate) struct CaptureArgs {
    /// Write to this file, in pcapng [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) write: Option<PathBuf>,

    /// Only connections with this port
    #[arg(long, value_name = "N")]
    pub(crate) port: Vec<u16>,

    /// Only connections with this address
    #[arg(long, value_name = "IP")]
    pub(crate) address: Vec<IpAddr>,

    /// Only connections of the process with this id
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Vec<u32>,

    /// Only connections of programs with this name, as `shunt status` shows it
    #[arg(long, value_name = "NAME")]
    pub(crate) program: Vec<String>,

    /// End after so many packets [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,

    /// End before the file has more bytes than this [default: never]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(100_000..))]
    pub(crate) bytes: Option<u64>,

    /// End after so many seconds [default: never]
    #[arg(long, value_name = "SECS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) seconds: Option<u64>,

    /// Keep so many bytes of each packet, with its headers [default: all]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(64..=65535))]
    pub(crate) snaplen: Option<u32>,

    /// Ask the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,
}

/// Which router of the overlay is asked as well, where there is one.
#[derive(Debug, Args)]
pub(crate) struct OverlayControl {
    /// Ask the overlay's router at this control socket as well
    #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
    pub(crate) control: PathBuf,
}

#[derive(Debug, Args)]
#[command(
    after_help = "An IPv6 address has brackets, as in [::1]:80. A process is described with all its TCP connections: who is at \
    the other end, which transport each direction takes, and why it is TCP. Other users' processes can be looked into by root only."
)]
pub(crate) struct ExplainArgs {
    /// A process id; the address of a connection, as in 127.0.0.1:80 or, for every address, :80; or
    /// a program
    #[arg(value_name = "PID|ADDRESS:PORT|PROGRAM", value_hint = clap::ValueHint::CommandName)]
    pub(crate) what: String,

    /// Describe only connections with this port at either end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Vec<u16>,

    /// Print the answer as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Ask the broker at this socket [default: for each process, the one that it looks for]
    #[arg(long, value_name = "SOCKET")]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) control: OverlayControl,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Exits with 0 if connections on this machine can take shared memory, with 1 if not. With --live, it exits with 0 \
    if each pair that could be tried used shared memory. It starts no broker, and leaves nothing behind."
)]
pub(crate) struct DoctorArgs {
    /// Start a server and a client of each kind, have them exchange data, and report which transport
    /// they used
    #[arg(long)]
    pub(crate) live: bool,

    /// With --live, try only this kind of pair
    #[arg(long, value_enum, requires = "live")]
    pub(crate) kind: Vec<crate::doctor::live::Kind>,

    /// Print the checks, or the pairs, as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// With --live, use the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) control: OverlayControl,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The file has versions, what `shunt doctor`, `status` and `config show` print, shunt's variables, units and logs. It has no\n\
    data of connections, no arguments of programs, no keys, and no other variables. As root it covers all programs."
)]
pub(crate) struct BugreportArgs {
    /// Write to this file, which must not exist [default: shunt-bugreport-TIME.txt]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Replace addresses by names, but for those of this host only
    #[arg(long)]
    pub(crate) no_addresses: bool,
}

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    override_usage = "shunt relay --config FILE\n       shunt relay <COMMAND>",
    after_help = "It runs in the foreground. SIGHUP reads the file again; SIGTERM ends it with all its connections, `drain` without."
)]
pub(crate) struct RelayArgs {
    /// Its listeners, trusted peers and routes (see docs/relay.md)
    #[arg(long, value_name = "FILE", required = true)]
    pub(crate) config: Option<PathBuf>,

    #[command(subcommand)]
    pub(crate) action: Option<RelayAction>,
}

/// Commands to a running relay, and those that prepare one.
#[derive(Debug, Subcommand)]
pub(crate) enum RelayAction {
    /// Show its connections, its pools and what it has counted
    Status {
        #[command(flatten)]
        control: RelayControl,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
    /// Change values of its configuration until it reads its file again, as in
    /// peer.mumbai.pool.low=32
    Set {
        #[command(flatten)]
        control: RelayControl,
        /// Which value is what from now on; parts of a list are named by their `name` or counted
        /// from 0
        #[arg(value_name = "NAME=VALUE", required = true)]
        assignments: Vec<String>,
    },
    /// Have it read its file again; connections go on
    Reload {
        #[command(flatten)]
        control: RelayControl,
    },
    /// Have it take no more connections, and end with the last
    Drain {
        #[command(flatten)]
        control: RelayControl,
        /// End after so many seconds even if there are connections
        #[arg(long, value_name = "SECS", default_value_t = 3600)]
        timeout: u64,
    },
    /// Say whether a configuration is sound
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        config: PathBuf,
    },
    /// Write a new key, which two relays then share, to a file
    NewKey {
        /// It must not exist yet
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RelayControl {
    /// The control socket of the relay
    #[arg(long, value_name = "SOCKET", default_value = shunt_relay::DEFAULT_CONTROL)]
    pub(crate) control: PathBuf,
}

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    override_usage = "shunt serve [OPTIONS] --listen ADDRESS SERVICE\n       shunt serve <COMMAND>",
    after_help = "It runs in the foreground. SIGHUP reads the backends again; SIGTERM ends it when its conversations have ended."
)]
pub(crate) struct ServeArgs {
    /// builtin:NAME, one of the services that are part of shunt, or a file that `shunt serve build`
    /// has made
    #[arg(value_name = "SERVICE", required = true)]
    pub(crate) service: Option<String>,

    /// Where clients connect to: ADDRESS:PORT, or unix:PATH. Give it several times for several
    /// listeners
    #[arg(long, value_name = "ADDRESS", required = true)]
    pub(crate) listen: Vec<shunt_serve::engine::Address>,

    /// The backends, in a file (see docs/usage.md, and docs/http-proxy.md for builtin:http-proxy)
    #[arg(long, value_name = "FILE")]
    pub(crate) backends: Option<PathBuf>,

    /// Fill a content store of the service with a file, or with the files of a directory, whose keys are
    /// their paths in it. A reload reads them again. Give it several times for more
    #[arg(long, value_name = "NAME=PATH")]
    pub(crate) content: Vec<shunt_serve::engine::Files>,

    /// Where conversations are served
    #[arg(long, value_enum, default_value_t = ServeEngine::Auto)]
    pub(crate) engine: ServeEngine,

    /// Run a service that the kernel's verifier rejects: in its own process, which is started again after a crash or
    /// if a call takes longer than a second
    #[arg(long)]
    pub(crate) unverified: bool,

    /// How a key becomes a backend [default: what the file says, else modulo]
    #[arg(long, value_enum)]
    pub(crate) hash: Option<ServeHash>,

    /// The most messages of a client address in a second, on all its connections together; more are
    /// refused
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub(crate) rate: Option<u64>,

    /// How many of them may come together [default: the rate]
    #[arg(long, value_name = "N", requires = "rate", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) burst: Option<u64>,

    /// Let the service add and remove backends by itself, with addresses in this network, as in 10.1.0.0/16. A
    /// client may then decide where the messages of other clients go (docs/serve.md). Give it several times for more
    #[arg(long, value_name = "NETWORK")]
    pub(crate) allow_register: Vec<ipnet::IpNet>,

    /// Threads that serve conversations
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=256))]
    pub(crate) threads: u64,

    /// Memory of builtin:cache for its items and their index, in MiB; at least 16
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    pub(crate) memory: u64,

    /// A page for Prometheus, at /metrics
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) metrics: Option<SocketAddr>,

    /// How long conversations may take to end when it ends
    #[arg(long, value_name = "SECS", default_value_t = 10)]
    pub(crate) drain: u64,

    #[command(flatten)]
    pub(crate) control: ServeControl,

    #[command(subcommand)]
    pub(crate) action: Option<ServeAction>,
}

/// Commands to a running service, and those that make one (see docs/serve.md).
#[derive(Debug, Subcommand)]
pub(crate) enum ServeAction {
    /// Write a service to begin with, NAME.c, and its tests, NAME.tests
    New {
        /// What it is called: letters, digits and hyphens
        #[arg(value_name = "NAME")]
        name: String,
        /// Where to write them
        #[arg(long, value_name = "DIR", default_value = ".")]
        directory: PathBuf,
        /// Begin with a service that has state: counters, a table, and a sequence number per
        /// connection
        #[arg(long)]
        stateful: bool,
        /// Begin with a service that answers from a content store
        #[arg(long, conflicts_with = "stateful")]
        contents: bool,
    },
    /// Compile a service, for the kernel and for user space, into NAME.bpf.o
    Build {
        /// Its source
        #[arg(value_name = "NAME.c")]
        source: PathBuf,
        /// Write the object here instead of beside the source
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Define a macro, as with a C compiler
        #[arg(short = 'D', value_name = "MACRO[=VALUE]")]
        define: Vec<String>,
    },
    /// Have the kernel verify a service, and run its tests in both halves; nothing is attached to
    /// anything
    Check {
        /// A file that build has made, or builtin:NAME
        #[arg(value_name = "SERVICE")]
        service: String,
        /// The tests [default: NAME.tests beside NAME.bpf.o, if it is there]
        #[arg(long, value_name = "FILE")]
        tests: Option<PathBuf>,
        /// Leave out the kernel, as where one may not load programs into it
        #[arg(long)]
        user: bool,
    },
    /// Show its clients, its backends, and which engine serves them and why
    Status {
        #[command(flatten)]
        control: ServeControl,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the entries of a table of its state, or the value of a counter or histogram
    Dump {
        /// Its name, as in the service's source and in the status
        #[arg(value_name = "NAME")]
        name: String,
        #[command(flatten)]
        control: ServeControl,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Have it read its backends again; conversations go on
    Reload {
        #[command(flatten)]
        control: ServeControl,
    },
    /// Add a backend until it ends, or give one another weight; conversations go on
    Register {
        /// ADDRESS:PORT, or unix:PATH
        #[arg(value_name = "ADDRESS")]
        address: shunt_serve::engine::Address,
        /// Its share of the keys, for ketama
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
        weight: u32,
        #[command(flatten)]
        control: ServeControl,
    },
    /// Remove a backend; it answers the messages that it has. A reload brings those of the file back
    Unregister {
        /// ADDRESS:PORT, or unix:PATH
        #[arg(value_name = "ADDRESS")]
        address: shunt_serve::engine::Address,
        #[command(flatten)]
        control: ServeControl,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServeControl {
    /// The control socket of the service
    #[arg(long, value_name = "SOCKET", default_value = shunt_serve::engine::DEFAULT_CONTROL)]
    pub(crate) control: PathBuf,
}

/// The engines that `--engine` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServeEngine {
    /// Each conversation where it is served faster, by what is under way in it
    Auto,
    /// In the kernel, as far as it can serve them
    Kernel,
    /// In user space
    User,
}

/// The ways from a key to a backend that `--hash` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServeHash {
    /// A number, or the hash of bytes, modulo the number of backends
    Modulo,
    /// The continuum of libketama, as memcached's clients use it
    Ketama,
    /// The service says which
    Service,
}

/// The parts of an overlay (see docs/overlay.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Overlay {
    /// Run the router of this host, in the foreground and in the host's network namespace; for root
    Router {
        /// The overlay's addresses, and which host has which of them
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// The name of this host, instead of the configuration's: all hosts can then have one file
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// This host's own address, instead of the configuration's [default port: 7450]
        #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = router)]
        address: Option<SocketAddr>,
    },
    /// Run a program in a container, of any kind, static ones included
    #[command(
        override_usage = "shunt overlay run [OPTIONS] [--] CMD [ARG]...",
        after_help = "CMD replaces shunt: its exit code and its signals are its own. A supervisor beside it is shown the calls that make \
            connections. Without a router CMD runs all the same, on the overlay, and one line on standard error says so.\n\n\
            Exit codes of shunt itself: 2 wrong flags, 126 CMD cannot be executed, 127 CMD not found."
    )]
    Run(OverlayRunArgs),
    /// Supervise a program that a router has looked at; the router runs this
    #[command(hide = true)]
    Supervisor {
        /// Where the router is asked, if one is
        #[arg(long, value_name = "SOCKET")]
        router: Option<PathBuf>,
        /// The program
        #[arg(long, value_name = "PID", default_value_t = 0)]
        process: u32,
        /// The record of a killed supervisor, which this one succeeds
        #[arg(long, value_name = "FD", conflicts_with_all = ["router", "process"])]
        take_over: Option<i32>,
    },
    /// Show what the router of this host knows, and which transport connections have taken and why
    Status {
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say which connections may be, and how they are treated: check a policy, have it hold, or
    /// show which one does
    #[command(subcommand)]
    Policy(OverlayPolicy),
    /// Write a new key, which all routers of an overlay then share, to a file, or change the one
    /// that is there step by step
    NewKey {
        /// Write another key beside the one that is there: routers understand both, and speak by
        /// the first
        #[arg(long, conflicts_with_all = ["use_next", "retire"])]
        next: bool,
        /// Have routers speak by the other one, when all have it
        #[arg(long, conflicts_with = "retire")]
        use_next: bool,
        /// Forget the former one, when all speak by the other
        #[arg(long)]
        retire: bool,
        /// Without these flags it must not exist yet
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// What can be done with a policy.
#[derive(Debug, Subcommand)]
pub(crate) enum OverlayPolicy {
    /// Say what is wrong with a file, and where; no router is needed
    Check {
        /// As docs/overlay.md describes it
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Have it hold from now on, until the router ends: connections that it forbids end now, others
    /// notice nothing
    Apply {
        /// As docs/overlay.md describes it
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
    },
    /// Make a policy file of Kubernetes NetworkPolicies and print it; no router is needed
    Import {
        /// YAML or JSON, as manifests or `kubectl get networkpolicies -A -o yaml` have it
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// The namespace of policies that name none
        #[arg(long, value_name = "NAME", default_value = "")]
        namespace: String,
        /// Print the policy file and the notes as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what the policy that holds decides about a connection, and by which rules
    Decide {
        /// The client's address, with its port if source-ports matter
        #[arg(value_name = "CLIENT", value_parser = client)]
        client: (IpAddr, Option<u16>),
        /// The server's address and port
        #[arg(value_name = "SERVER:PORT")]
        server: SocketAddr,
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the rules that hold, and how many connections are by which
    Show {
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
}

/// Parses a router's address, which has a port or the default one.
fn router(text: &str) -> Result<SocketAddr, String> {
    match (text.parse::<SocketAddr>(), text.parse::<IpAddr>()) {
        (Ok(address), _) => Ok(address),
        (_, Ok(address)) => Ok((address, shunt_overlay::DEFAULT_PORT).into()),
        _ => Err("expected an address, as 192.168.0.1, or one with a port, as 192.168.0.1:7450".to_owned()),
    }
}

/// Parses an address with or without a port.
fn client(text: &str) -> Result<(IpAddr, Option<u16>), String> {
    match (text.parse::<SocketAddr>(), text.parse::<IpAddr>()) {
        (Ok(client), _) => Ok((client.ip(), Some(client.port()))),
        (_, Ok(address)) => Ok((address, None)),
        _ => Err("expected an address, as 10.50.1.2, or one with a port, as 10.50.1.2:40000".to_owned()),
    }
}

#[derive(Debug, Args)]
pub(crate) struct OverlayRunArgs {
    /// The socket of the host's router
    #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_SOCKET)]
    pub(crate) router: PathBuf,

    /// The program and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true, allow_hyphen_values = false)]
    pub(crate) command: Vec<OsString>,
}

/// The runtime of containers under shunt (see docs/containers.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Runtime {
    /// Add it to Docker's configuration; for root
    Register(DaemonJson),
    /// Take it out of there again, and change nothing else
    Unregister(DaemonJson),
    /// Show whether it is registered, and whether what it needs is on this host
    Status {
        #[command(flatten)]
        daemon_json: DaemonJson,
        /// Print the same as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DaemonJson {
    /// Docker's configuration
    #[arg(long = "daemon-json", value_name = "FILE", default_value = crate::runtime::DAEMON_JSON)]
    pub(crate) file: PathBuf,
}

/// Services of systemd under shunt (see docs/systemd.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Service {
    /// Write a drop-in, with which the service runs under shunt from its next start on; for root
    #[command(
        after_help = "Nothing is restarted without --restart. `redis-server` stands for redis-server.service; `postgresql@` for all\n\
        instances of a template. A unit that cannot run under shunt is refused, with the reason."
    )]
    Enable(ServiceEnable),
    /// Remove the drop-in; for root
    Disable(ServiceDisable),
    /// Show whether the service is enabled, what runs under shunt, and by which transports it talks
    Status {
        /// The unit [default: all that are enabled]
        #[arg(value_name = "NAME")]
        name: Option<String>,
        /// Print the same as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        place: ServicePlace,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServiceEnable {
    /// The unit
    #[arg(value_name = "NAME")]
    pub(crate) name: String,

    /// Restart it if it runs and is not under shunt
    #[arg(long)]
    pub(crate) restart: bool,

    /// Print the drop-in, and change nothing
    #[arg(long, conflicts_with_all = ["restart", "json"])]
    pub(crate) print: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// The broker's socket [default: the system's]
    #[arg(long, value_name = "SOCKET")]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) place: ServicePlace,
}

#[derive(Debug, Args)]
pub(crate) struct ServiceDisable {
    /// The unit
    #[arg(value_name = "NAME", required_unless_present = "all", conflicts_with = "all")]
    pub(crate) name: Option<String>,

    /// All that are enabled
    #[arg(long)]
    pub(crate) all: bool,

    /// Restart those that run under shunt
    #[arg(long)]
    pub(crate) restart: bool,

    /// Print a JSON document for each unit
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) place: ServicePlace,
}

/// Where drop-ins are.
#[derive(Debug, Args)]
pub(crate) struct ServicePlace {
    /// Only until the machine is started again
    #[arg(long)]
    runtime: bool,

    /// Another directory of units, for tests
    #[arg(long, value_name = "DIR", hide = true)]
    directory: Option<PathBuf>,
}

impl ServicePlace {
    pub(crate) fn directory(&self) -> &std::path::Path {
        let default = if self.runtime { "/run/systemd/system" } else { "/etc/systemd/system" };
        self.directory.as_deref().unwrap_or(std::path::Path::new(default))
    }
}

/// The configuration of `shunt run` and of brokers (see docs/configuration.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Show every value that holds, and where it comes from
    #[command(
        after_help = "The system's file is /etc/shunt/shunt.toml, a user's $XDG_CONFIG_HOME/shunt/shunt.toml or ~/.config/shunt/shunt.toml.\n\
        SHUNT_CONFIG names another in the place of both; if it is empty, none is read."
    )]
    Show {
        /// Only what holds for the program of this name, under `shunt run`
        #[arg(value_name = "PROGRAM")]
        program: Option<String>,
        /// Print the same as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what is wrong with a file, and where; without one, with those that are read
    #[command(after_help = "Exits with 0 if nothing is wrong, with 1 if something is.")]
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Print what is wrong as JSON
        #[arg(long)]
        json: bool,
    },
}

/// The filter of the log, as in `info` or `shunt_broker=debug`.
pub(crate) const LOG: &str = "SHUNT_LOG";
/// Where the broker's log goes.
pub(crate) const LOG_FILE: &str = "SHUNT_LOG_FILE";

/// A thread that looks for work longer than this has stopped being useful to anyone.
const MAX_SPIN_USECS: u32 = 1_000_000;

pub(crate) fn parse_spin(text: &str) -> Result<String, String> {
    let number = || text.parse().is_ok_and(|usecs: u32| usecs <= MAX_SPIN_USECS);
    if matches!(text, "auto" | "off") || number() {
        return Ok(text.to_owned());
    }
    Err(format!("expected auto, off, or microseconds from 0 to {MAX_SPIN_USECS}"))
}

/// A budget above this is none.
const MAX_RING_MEMORY_MIB: u32 = 1 << 20;

pub(crate) fn parse_ring_memory(text: &str) -> Result<String, String> {
    let number = || text.parse().is_ok_and(|mib: u32| mib <= MAX_RING_MEMORY_MIB);
    if text == "auto" || number() {
        return Ok(text.to_owned());
    }
    Err(format!("expected auto, or MiB from 0 to {MAX_RING_MEMORY_MIB}"))
}

pub(crate) fn parse_idle_exit(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0);
    seconds.ok_or_else(|| "expected seconds, 1 at least".to_owned())
}

pub(crate) fn parse_metrics(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected an address with a port, as 127.0.0.1:9441".to_owned())
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("from 0.1 to 3600 seconds".to_owned()),
    }
}

pub(crate) fn parse_ring_bytes(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().filter(|bytes| Geometry::new(*bytes).is_some());
    bytes.ok_or_else(|| format!("expected a power of two from {MIN_RING_BYTES} to {MAX_RING_BYTES}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_registry_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_command_is_the_commands() {
        let cli = Cli::try_parse_from(["shunt", "run", "--spin", "off", "ls", "-l", "--", "--json"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not a run") };
        assert_eq!(run.command, ["ls", "-l", "--", "--json"]);
        assert_eq!(run.spin.as_deref(), Some("off"));
    }

    #[test]
    fn spin_is_a_word_or_microseconds() {
        for good in ["auto", "off", "0", "50", "1000000"] {
            assert!(parse_spin(good).is_ok(), "{good}");
        }
        for bad in ["", "on", "-1", "1.5", "10us", "1000001"] {
            assert!(parse_spin(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ring_memory_is_a_word_or_mebibytes() {
        for good in ["auto", "0", "64", "1048576"] {
            assert!(parse_ring_memory(good).is_ok(), "{good}");
        }
        for bad in ["", "off", "-1", "64M", "1.5", "1048577"] {
            assert!(parse_ring_memory(bad).is_err(), "{bad}");
        }
    }

    /// Every command of `shunt` in a code block of a document has arguments that exist.
    #[test]
    fn the_commands_of_the_documents_are_understood() {
        let documents = shunt_documents::files()
            .into_iter()
            .filter(|path| path.extension().is_some_and(|it| it == "md") && !path.ends_with("CHANGELOG.md"));
        let mut failures = Vec::new();
        let mut understood = 0;
        for document in documents {
            for found in shunt_documents::shell::commands(&shunt_documents::read(&document)) {
                if found.words[0] != "shunt" && !found.words[0].ends_with("/bin/shunt") {
                    continue;
                }
                match Cli::try_parse_from(&found.words) {
                    Ok(_) => understood += 1,
                    Err(error) => {
                        failures.push(format!("{}:{}: {error}", document.display(), found.line));
                    }
                }
            }
        }
        assert!(failures.is_empty(), "{} commands:\n{}", failures.len(), failures.join("\n"));
        assert!(understood > 80, "only {understood} commands were found");
    }

    #[test]
    fn rings_are_powers_of_two() {
        assert_eq!(parse_ring_bytes("65536"), Ok(65536));
        for bad in ["", "0", "4095", "65537", "33554432", "64k"] {
            assert!(parse_ring_bytes(bad).is_err(), "{bad}");
        }
    }
}
