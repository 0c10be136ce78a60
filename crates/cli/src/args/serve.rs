//! Arguments of `shunt serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

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
