//! The list of stacks. Each has its users' usual configuration, but is small, alone in a directory
//! and without logs.

use super::load::{Load, sysbench_options};
use super::stack::{Configuration, Need, Service, Stack};

/// The configuration of nginx as a proxy with persistent connections to this service.
macro_rules! proxy_of {
    ($service:literal) => {
        concat!(
            "upstream app { server 127.0.0.1:@",
            $service,
            "@; keepalive 64; keepalive_requests 1000000; }
             server { listen 127.0.0.1:@nginx@; location / {
                 proxy_pass http://app; proxy_http_version 1.1; proxy_set_header Connection \"\"; } }"
        )
    };
}

/// A Python load whose threads each send one request at a time.
macro_rules! threads_of {
    ($file:literal) => {
        concat!(include_str!(concat!("files/", $file)), include_str!("files/threads.py"))
    };
}

/// The path of Tomcat's Java archive in Debian.
macro_rules! tomcat_jar {
    () => {
        "/usr/share/java/tomcat10-embed-core.jar"
    };
}
macro_rules! jdbc_jar {
    () => {
        "/usr/share/java/postgresql.jar"
    };
}
/// The usual directory of Kafka's Java archives.
macro_rules! kafka_jars {
    () => {
        "/opt/kafka/libs"
    };
}
macro_rules! tomcat_arguments {
    () => {
        concat!("-Xmx256m -cp ", tomcat_jar!(), ":", jdbc_jar!(), " @dir@/Item.java")
    };
}

pub(super) const STACKS: &[Stack] = &[
    Stack {
        name: "web-gunicorn",
        title: "wrk, nginx, gunicorn with Flask (2 workers of 16 threads), psycopg2 to PostgreSQL, redis-py to Redis",
        needs: &[
            WRK,
            NGINX,
            Need::Program("gunicorn", "gunicorn"),
            Need::Python("flask", "python3-flask"),
            Need::Python("psycopg2", "python3-psycopg2"),
            Need::Python("redis", "python3-redis"),
            REDIS_SERVER,
            POSTGRESQL,
        ],
        services: &[
            POSTGRES,
            REDIS,
            Service {
                name: "gunicorn",
                program: "gunicorn",
                configuration: Configuration::Files(&[("app.py", include_str!("files/gunicorn.py"))]),
                arguments: "--workers 2 --threads 16 --keep-alive 60 --bind 127.0.0.1:@gunicorn@ --chdir @dir@ app:app",
                ..Service::PLAIN
            },
            Service::nginx(proxy_of!("gunicorn")),
        ],
        load: Load::Wrk { server: "nginx", path: "item/42" },
    },
    Stack {
        name: "web-uvicorn",
        title: "wrk, nginx, uvicorn with FastAPI on uvloop (2 workers), asyncpg to PostgreSQL, redis.asyncio to Redis",
        needs: &[
            WRK,
            NGINX,
            Need::Program("uvicorn", "uvicorn"),
            Need::Python("fastapi", "python3-fastapi"),
            Need::Python("uvloop", "python3-uvloop"),
            Need::Python("httptools", "python3-httptools"),
            Need::Python("asyncpg", "python3-asyncpg"),
            Need::Python("redis", "python3-redis"),
            REDIS_SERVER,
            POSTGRESQL,
        ],
        services: &[
            POSTGRES,
            REDIS,
            Service {
                name: "uvicorn",
                program: "uvicorn",
                configuration: Configuration::Files(&[("app.py", include_str!("files/uvicorn.py"))]),
                arguments: "--workers 2 --loop uvloop --http httptools --no-access-log --log-level warning \
                            --timeout-keep-alive 60 --host 127.0.0.1 --port @uvicorn@ --app-dir @dir@ app:app",
                ..Service::PLAIN
            },
            Service::nginx(proxy_of!("uvicorn")),
        ],
        load: Load::Wrk { server: "nginx", path: "item/42" },
    },
    Stack {
        name: "mariadb-select",
        title: "sysbench oltp_point_select, MariaDB",
        needs: &[SYSBENCH_PROGRAM, MARIADB_SERVER, MARIADB_CLIENT],
        services: &[MARIADB],
        load: Load::Sysbench { test: "oltp_point_select" },
    },
    Stack {
        name: "mariadb-write",
        title: "sysbench oltp_read_write, MariaDB",
        needs: &[SYSBENCH_PROGRAM, MARIADB_SERVER, MARIADB_CLIENT],
        services: &[MARIADB],
        load: Load::Sysbench { test: "oltp_read_write" },
    },
    Stack {
        name: "node",
        title: "wrk, nginx, Node with Express, pg to PostgreSQL, node-redis to Redis",
        needs: &[
            WRK,
            NGINX,
            Need::Program("node", "nodejs"),
            Need::Node("express", "node-express (or express by npm)"),
            Need::Node("pg", "node-pg (or pg by npm)"),
            Need::Node("redis", "node-redis (or redis by npm)"),
            REDIS_SERVER,
            POSTGRESQL,
        ],
        services: &[
            POSTGRES,
            REDIS,
            Service {
                name: "node",
                program: "node",
                configuration: Configuration::Files(&[("app.js", include_str!("files/node.js"))]),
                environment: &[("NODE_ENV", "production")],
                arguments: "@dir@/app.js",
                ..Service::PLAIN
            },
            Service::nginx(proxy_of!("node")),
        ],
        load: Load::Wrk { server: "nginx", path: "item/42" },
    },
    Stack {
        name: "puma",
        title: "wrk, nginx, Puma (2 workers of 16 threads), redis-rb to Redis",
        needs: &[WRK, NGINX, Need::Program("puma", "puma"), Need::Ruby("redis", "ruby-redis"), REDIS_SERVER],
        services: &[
            REDIS,
            Service {
                name: "puma",
                program: "puma",
                configuration: Configuration::Files(&[("puma.ru", include_str!("files/puma.ru"))]),
                arguments: "--quiet --workers 2 --threads 16:16 --environment production --bind tcp://127.0.0.1:@puma@ @dir@/puma.ru",
                ..Service::PLAIN
            },
            Service::nginx(proxy_of!("puma")),
        ],
        load: Load::Wrk { server: "nginx", path: "item/42" },
    },
    Stack {
        name: "tomcat",
        title: "wrk, nginx, Tomcat, PostgreSQL by JDBC",
        needs: &[WRK, NGINX, Need::Java(17, "openjdk-17-jdk-headless"), TOMCAT_JAR, JDBC_JAR, POSTGRESQL],
        services: &[POSTGRES, TOMCAT, Service::nginx(proxy_of!("tomcat"))],
        load: Load::Wrk { server: "nginx", path: "item/42" },
    },
    Stack {
        name: "tomcat-virtual",
        title: "wrk, nginx, Tomcat with virtual threads, PostgreSQL by JDBC",
        needs: &[WRK, NGINX, Need::Java(21, "openjdk-21-jdk-headless"), TOMCAT_JAR, JDBC_JAR, POSTGRESQL],
        services: &[
            POSTGRES,
            Service { arguments: concat!(tomcat_arguments!(), " newVirtualThreadPerTaskExecutor"), ..TOMCAT },
            Service::nginx(proxy_of!("tomcat")),
        ],
        load: Load::Wrk { server: "nginx", path: "item/42" },
    },
    Stack {
        name: "php",
        title: "wrk, Apache (event), PHP-FPM by TCP (8 children), mysqli to MariaDB",
        needs: &[
            WRK,
            Need::Program("apache2", "apache2-bin"),
            Need::Program("php-fpm*", "php-fpm"),
            Need::Php("mysqli", "php-mysql"),
            MARIADB_SERVER,
            MARIADB_CLIENT,
        ],
        services: &[
            MARIADB,
            Service {
                name: "php",
                program: "php-fpm*",
                configuration: Configuration::Files(&[("fpm.conf", include_str!("files/fpm.conf"))]),
                arguments: "-F -R -y @dir@/fpm.conf",
                ..Service::PLAIN
            },
            Service {
                name: "apache",
                program: "apache2",
                configuration: Configuration::Files(&[
                    ("apache.conf", include_str!("files/apache.conf")),
                    ("item.php", include_str!("files/item.php")),
                ]),
                arguments: "-f @dir@/apache.conf -D FOREGROUND",
                ..Service::PLAIN
            },
        ],
        load: Load::Wrk { server: "apache", path: "item.php?number=42" },
    },
    Stack {
        name: "haproxy",
        title: "wrk, HAProxy, nginx: a file of 1 KB",
        needs: &[WRK, NGINX, Need::Program("haproxy", "haproxy")],
        services: &[
            Service::nginx(FILES),
            Service {
                name: "haproxy",
                program: "haproxy",
                configuration: Configuration::Files(&[("haproxy.cfg", include_str!("files/haproxy.cfg"))]),
                arguments: "-db -f @dir@/haproxy.cfg",
                ..Service::PLAIN
            },
        ],
        load: Load::Wrk { server: "haproxy", path: "small" },
    },
    Stack {
        name: "varnish",
        title: "wrk, Varnish, nginx: a file of 1 KB that is not cached",
        needs: &[WRK, NGINX, Need::Program("varnishd", "varnish"), Need::Program("gcc", "gcc")],
        services: &[
            Service::nginx(FILES),
            Service {
                name: "varnish",
                program: "varnishd",
                configuration: Configuration::Files(&[("files.vcl", include_str!("files/varnish.vcl"))]),
                arguments: "-F -j none -a 127.0.0.1:@varnish@ -s malloc,64m -n @dir@/varnish -f @dir@/files.vcl",
                ..Service::PLAIN
            },
        ],
        load: Load::Wrk { server: "varnish", path: "small" },
    },
    Stack {
        name: "twemproxy",
        title: "pymemcache, twemproxy, two memcached: a set, and a get of ten",
        needs: &[
            Need::Program("nutcracker", "nutcracker"),
            Need::Program("memcached", "memcached"),
            Need::Python("pymemcache", "python3-pymemcache"),
        ],
        services: &[
            Service {
                name: "memcached1",
                arguments: "-u @user@ -l 127.0.0.1 -p @memcached1@ -U 0",
                ..MEMCACHED
            },
            Service {
                name: "memcached2",
                arguments: "-u @user@ -l 127.0.0.1 -p @memcached2@ -U 0",
                ..MEMCACHED
            },
            Service {
                name: "twemproxy",
                program: "nutcracker",
                configuration: Configuration::Files(&[(
                    "twemproxy.yml",
                    include_str!("files/twemproxy.yml"),
                )]),
                arguments: "-c @dir@/twemproxy.yml -a 127.0.0.2 -s @twemproxy@",
                ..Service::PLAIN
            },
        ],
        load: Load::Script { program: "python3", file: ("client.py", threads_of!("memcached_client.py")) },
    },
    Stack {
        name: "rabbitmq",
        title: "pika, RabbitMQ: a message of 100 B published, delivered and acknowledged",
        needs: &[
            Need::Program(RABBITMQ_SERVER, "rabbitmq-server"),
            Need::Program("epmd", "erlang-base"),
            Need::Python("pika", "python3-pika"),
        ],
        services: &[
            Service {
                name: "epmd",
                program: "epmd",
                arguments: "-address 127.0.0.1 -port @epmd@",
                ..Service::PLAIN
            },
            Service {
                name: "rabbitmq",
                program: RABBITMQ_SERVER,
                other_ports: &["distribution"],
                // Isolates this RabbitMQ from the machine's own. A missing file counts as an empty
                // one.
                environment: &[
                    ("HOME", "@dir@"),
                    ("ERL_EPMD_PORT", "@epmd@"),
                    ("RABBITMQ_NODENAME", "shunt@localhost"),
                    ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1"),
                    ("RABBITMQ_NODE_PORT", "@rabbitmq@"),
                    ("RABBITMQ_DIST_PORT", "@distribution@"),
                    ("RABBITMQ_CONF_ENV_FILE", "@dir@/none"),
                    ("RABBITMQ_CONFIG_FILE", "@dir@/none"),
                    ("RABBITMQ_ENABLED_PLUGINS_FILE", "@dir@/none"),
                    ("RABBITMQ_PID_FILE", "@dir@/pid"),
                    ("RABBITMQ_MNESIA_BASE", "@dir@/data"),
                    ("RABBITMQ_LOGS", "-"),
                ],
                ..Service::PLAIN
            },
        ],
        load: Load::Script { program: "python3", file: ("client.py", threads_of!("rabbitmq_client.py")) },
    },
    Stack {
        name: "celery",
        title: "Celery's client, Redis, Celery's worker (2 processes): a task and its result",
        needs: &[
            Need::Python("celery", "python3-celery"),
            Need::Python("redis", "python3-redis"),
            REDIS_SERVER,
        ],
        services: &[
            REDIS,
            Service {
                name: "celery",
                program: "python3",
                configuration: Configuration::Files(&[("tasks.py", include_str!("files/celery_tasks.py"))]),
                listens: false,
                arguments: "-m celery -A tasks worker --concurrency 2 --loglevel ERROR",
                after: &["python3 -m celery -A tasks inspect ping"],
                ..Service::PLAIN
            },
        ],
        load: Load::Script { program: "python3", file: ("client.py", threads_of!("celery_client.py")) },
    },
    Stack {
        name: "kafka",
        title: "librdkafka, Kafka: a record of 100 B that is acknowledged",
        needs: &[
            Need::Java(17, "openjdk-17-jdk-headless"),
            Need::Jar(kafka_jars!(), "Apache Kafka in /opt/kafka"),
            Need::Python("confluent_kafka", "python3-confluent-kafka"),
        ],
        services: &[Service {
            name: "kafka",
            program: "java",
            configuration: Configuration::Files(&[(
                "kafka.properties",
                include_str!("files/kafka.properties"),
            )]),
            other_ports: &["controller"],
            environment: &[("CLASSPATH", concat!(kafka_jars!(), "/*"))],
            before: &[
                "java kafka.tools.StorageTool format -t AAAAAAAAAAAAAAAAAAAAAQ -c @dir@/kafka.properties",
            ],
            arguments: "-Xmx512m kafka.Kafka @dir@/kafka.properties",
            after: &[
                "java org.apache.kafka.tools.TopicCommand --bootstrap-server 127.0.0.1:@kafka@ --create --topic items",
            ],
            ..Service::PLAIN
        }],
        load: Load::Script { program: "python3", file: ("client.py", threads_of!("kafka_client.py")) },
    },
    Stack {
        name: "grpc",
        title: "gRPC for Python: an echo of 100 B, 8 threads",
        needs: &[Need::Python("grpc", "python3-grpcio")],
        services: &[Service {
            name: "server",
            program: "python3",
            configuration: Configuration::Files(&[("server.py", include_str!("files/grpc_server.py"))]),
            arguments: "@dir@/server.py",
            ..Service::PLAIN
        }],
        load: Load::Script { program: "python3", file: ("client.py", threads_of!("grpc_client.py")) },
    },
];

const WRK: Need = Need::Program("wrk", "wrk");
const NGINX: Need = Need::Program("nginx", "nginx-light");
const REDIS_SERVER: Need = Need::Program("redis-server", "redis-server");
const POSTGRESQL: Need = Need::Program("initdb", "postgresql");
/// Not the wrapper in PATH, which runs it as another user.
const RABBITMQ_SERVER: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";
const SYSBENCH_PROGRAM: Need = Need::Program("sysbench", "sysbench");
const MARIADB_SERVER: Need = Need::Program("mariadbd", "mariadb-server");
const MARIADB_CLIENT: Need = Need::Program("mariadb", "mariadb-client");

const FILES: &str = "server { listen 127.0.0.1:@nginx@; root @dir@/www; }";

const TOMCAT_JAR: Need = Need::Jar(tomcat_jar!(), "libtomcat10-embed-java");
const JDBC_JAR: Need = Need::Jar(jdbc_jar!(), "libpostgresql-jdbc-java");

const TOMCAT: Service = Service {
    name: "tomcat",
    program: "java",
    configuration: Configuration::Files(&[("Item.java", include_str!("files/Item.java"))]),
    arguments: tomcat_arguments!(),
    ..Service::PLAIN
};

const MEMCACHED: Service = Service { program: "memcached", ..Service::PLAIN };

const REDIS: Service = Service {
    name: "redis",
    program: "redis-server",
    arguments: "--bind 127.0.0.1 --port @redis@ --save --appendonly no --dir @dir@",
    ..Service::PLAIN
};

const POSTGRES: Service = Service {
    name: "postgres",
    program: "postgres",
    user: Some("postgres"),
    configuration: Configuration::Files(&[("items.sql", include_str!("files/items.sql"))]),
    before: &["initdb --auth trust --no-sync --username postgres --pgdata @dir@/data"],
    arguments: "-D @dir@/data -p @postgres@ -c listen_addresses=127.0.0.1 -c unix_socket_directories=@dir@",
    after: &["psql -q -h 127.0.0.1 -p @postgres@ -U postgres -v ON_ERROR_STOP=1 -f @dir@/items.sql postgres"],
    ..Service::PLAIN
};

/// MariaDB as Debian ships it: with io_uring for its files.
const MARIADB: Service = Service {
    name: "mariadb",
    program: "mariadbd",
    configuration: Configuration::Files(&[("items.sql", include_str!("files/items_mariadb.sql"))]),
    before: &["mariadb-install-db --no-defaults --user=@user@ --skip-test-db --datadir=@dir@/data"],
    arguments: "--no-defaults --user=@user@ --skip-grant-tables --datadir=@dir@/data --socket=@dir@/socket \
                --bind-address=127.0.0.1 --port=@mariadb@ --init-file=@dir@/items.sql",
    after: &[concat!("sysbench oltp_read_write ", sysbench_options!(), " prepare")],
    ..Service::PLAIN
};
