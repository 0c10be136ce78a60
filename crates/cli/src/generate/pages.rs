//! What the manual pages have beyond what the parser knows: examples, files and other pages.

/// The sections of one page.
pub(super) struct More {
    /// The page, without its section of the manual.
    pub(super) page: &'static str,
    /// Commands, and what each does.
    pub(super) examples: &'static [(&'static str, &'static str)],
    /// Files, and what each is.
    pub(super) files: &'static [(&'static str, &'static str)],
    /// Other pages.
    pub(super) see_also: &'static [&'static str],
}

const BROKER: (&str, &str) = ("/run/shunt/broker/broker.sock", "The socket of the system's broker.");
const OWN: (&str, &str) = ("$XDG_RUNTIME_DIR/shunt/broker.sock", "The socket of the user's broker.");
const CONFIGURATION: (&str, &str) =
    ("/etc/shunt/shunt.toml", "The configuration of the system: see shunt.toml(5).");

/// Every page that has more.
pub(super) const MORE: &[More] = &[
    More {
        page: "shunt",
        examples: &[
            (
                "shunt run -- redis-server",
                "Start a server under shunt. Its clients are started the same way.",
            ),
            ("shunt status", "Show the transport of each connection, and why some are on TCP."),
            (
                "sudo shunt service enable redis-server",
                "Have a service of systemd run under shunt from its next start on.",
            ),
        ],
        files: &[CONFIGURATION, BROKER, OWN],
        see_also: &[
            "shunt-run(1)",
            "shunt-status(1)",
            "shunt-explain(1)",
            "shunt-doctor(1)",
            "shunt-service(1)",
            "shunt.toml(5)",
        ],
    },
    More {
        page: "shunt-run",
        examples: &[
            ("shunt run -- memcached -p 11211", "Run a server under shunt."),
            ("shunt run --spin off -- python3 client.py", "Run a client that never polls before it sleeps."),
            ("shunt run --transport tcp -- make test", "Run programs on TCP only."),
        ],
        files: &[CONFIGURATION, BROKER, OWN],
        see_also: &["shunt-explain(1)", "shunt-service(1)", "shunt-daemon(1)", "shunt.toml(5)", "ld.so(8)"],
    },
    More {
        page: "shunt-daemon",
        examples: &[
            (
                "systemctl enable --now shunt.socket",
                "Have systemd start the system's broker with its first program.",
            ),
            (
                "shunt daemon --detach --idle-exit 60",
                "Start a broker of this user that ends a minute after its last program.",
            ),
        ],
        files: &[CONFIGURATION, BROKER, OWN],
        see_also: &["shunt-status(1)", "shunt.toml(5)", "systemd.socket(5)"],
    },
    More {
        page: "shunt-status",
        examples: &[("shunt status --json | jq .processes[].program", "List the programs under shunt.")],
        files: &[BROKER, OWN],
        see_also: &["shunt-top(1)", "shunt-explain(1)", "shunt-capture(1)"],
    },
    More {
        page: "shunt-top",
        examples: &[(
            "shunt top --rows connections --filter 6379",
            "Show the rates of the connections of one port.",
        )],
        files: &[BROKER, OWN],
        see_also: &["shunt-status(1)"],
    },
    More {
        page: "shunt-capture",
        examples: &[(
            "shunt capture --port 6379 -w redis.pcapng",
            "Write the connections of one port for Wireshark.",
        )],
        files: &[BROKER, OWN],
        see_also: &["shunt-status(1)", "tcpdump(8)", "wireshark(1)"],
    },
    More {
        page: "shunt-explain",
        examples: &[
            ("sudo shunt explain 4711", "Explain the transports of one process."),
            ("shunt explain 127.0.0.1:6379", "Explain the connections of one address."),
            ("shunt explain /usr/bin/dockerd", "Say whether a program can run under shunt."),
        ],
        files: &[BROKER, OWN],
        see_also: &["shunt-status(1)", "shunt-doctor(1)"],
    },
    More {
        page: "shunt-attach",
        examples: &[("sudo shunt attach 4711", "Put a process under shunt that runs already.")],
        files: &[BROKER, OWN],
        see_also: &["shunt-detach(1)", "shunt-service(1)", "shunt-status(1)"],
    },
    More {
        page: "shunt-detach",
        examples: &[("sudo shunt detach 4711", "Make all connections of a process use TCP, for good.")],
        files: &[BROKER, OWN],
        see_also: &["shunt-attach(1)"],
    },
    More {
        page: "shunt-doctor",
        examples: &[
            ("shunt doctor", "Try what shunt needs of this machine."),
            ("shunt doctor --live", "Have pairs of programs exchange data, and report their transport."),
        ],
        files: &[CONFIGURATION],
        see_also: &["shunt-explain(1)"],
    },
    More {
        page: "shunt-bugreport",
        examples: &[(
            "sudo shunt bugreport --no-addresses -o report.txt",
            "Write a report without addresses.",
        )],
        files: &[CONFIGURATION],
        see_also: &["shunt-doctor(1)", "shunt-explain(1)"],
    },
    More {
        page: "shunt-service",
        examples: &[
            ("shunt service enable redis-server --restart", "Put a service under shunt now."),
            (
                "shunt service enable postgresql@ --print",
                "Show what would be written for all instances of a template.",
            ),
            ("shunt service status", "Show every service that is enabled, and its connections by transport."),
            ("shunt service disable --all", "Take all services out again, from their next start on."),
        ],
        files: &[
            ("/etc/systemd/system/NAME.service.d/50-shunt.conf", "The drop-in of a service."),
            (
                "/etc/postgresql/VERSION/CLUSTER/environment",
                "The variables of a cluster of PostgreSQL, on Debian.",
            ),
            BROKER,
        ],
        see_also: &["shunt-run(1)", "shunt-explain(1)", "systemd.unit(5)", "systemd.exec(5)"],
    },
    More {
        page: "shunt-config",
        examples: &[
            ("shunt config show postgres", "Show what holds for programs of one name."),
            ("shunt config check mine.toml", "Check a file."),
        ],
        files: &[CONFIGURATION, ("~/.config/shunt/shunt.toml", "The configuration of a user.")],
        see_also: &["shunt.toml(5)"],
    },
    More {
        page: "shunt-runtime",
        examples: &[
            ("shunt runtime register", "Add the runtime to Docker's configuration."),
            ("docker run --runtime=shunt memcached", "Run a container under shunt."),
        ],
        files: &[
            ("/etc/docker/daemon.json", "Docker's configuration."),
            ("/etc/shunt/runtime.toml", "The settings of the runtime."),
        ],
        see_also: &["shunt-explain(1)", "docker-run(1)"],
    },
    More {
        page: "shunt-relay",
        examples: &[
            ("shunt relay check /etc/shunt/relay.toml", "Check a configuration."),
            ("systemctl enable --now shunt-relay@relay", "Run the relay of that file."),
        ],
        files: &[("/etc/shunt/NAME.toml", "The configuration of shunt-relay@NAME.service.")],
        see_also: &["shunt(1)"],
    },
    More {
        page: "shunt-overlay",
        examples: &[("systemctl enable --now shunt-overlay", "Run the router of this host.")],
        files: &[
            ("/etc/shunt/overlay.toml", "The configuration of the router."),
            ("/etc/shunt/overlay.key", "The key that all routers share."),
        ],
        see_also: &["shunt-runtime(1)"],
    },
    More {
        page: "shunt-serve",
        examples: &[
            ("shunt serve builtin:echo --listen 127.0.0.1:4000", "Run an echo service."),
            (
                "shunt serve builtin:http-proxy --listen 127.0.0.1:8080 --backends proxy.toml",
                "Run an HTTP proxy in front of the backends of a file.",
            ),
        ],
        files: &[],
        see_also: &["shunt(1)"],
    },
    More {
        page: "shunt-bench",
        examples: &[("shunt bench local memcached redis", "Compare two servers over each transport.")],
        files: &[],
        see_also: &["shunt-report(1)"],
    },
    More {
        page: "shunt-report",
        examples: &[(
            "shunt report --program \"./server 7000\" --load \"./load 7000\"",
            "Compare your programs without shunt and under it.",
        )],
        files: &[],
        see_also: &["shunt-bench(1)"],
    },
];
