//! One service of Apache Thrift's, made by its own compiler, in three languages: each is a backend, and each a client of
//! all three, framed and not.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock};

use shunt_netns::Net;
use shunt_serve::hash::{Placement, Scheme};
use shunt_serve::service::Key;

use crate::common::Shell;
use crate::common::serving::Serving;
use crate::process::{SOURCES, Server, make, output, python};

/// In the order of the backends.
const LANGUAGES: [&str; 3] = ["python", "cpp", "java"];
const FORMS: [&str; 2] = ["framed", "buffered"];
/// Of each kind of call.
const KEYS: u16 = 24;
const JARS: &str = "thrift.jar slf4j-api.jar slf4j-nop.jar";

/// What was compiled, once for all tests.
static COMPILED: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve-peers");
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    let source = |name: &str| format!("{SOURCES}/{name}");
    let generate = ["cpp:no_skeleton", "py", "java:generated_annotations=suppress"];
    for language in generate {
        make(&directory, "thrift", &["-r", "--gen", language, &source("peer.thrift")]);
    }
    let cpp = format!(
        "g++ -Igen-cpp -o peer {} gen-cpp/Peer.cpp gen-cpp/Wider.cpp gen-cpp/peer_types.cpp -lthrift -pthread",
        source("main.cpp")
    );
    let classes = "gen-java/peer/*.java";
    let java = format!("javac -nowarn -cp {} -d classes {classes} {}", jars(), source("Main.java"));
    std::thread::scope(|scope| {
        for line in [&cpp, &java] {
            scope.spawn(|| make(&directory, "sh", &["-c", line]));
        }
    });
    directory
});

fn jars() -> String {
    JARS.split(' ').map(|jar| format!("/usr/share/java/{jar}")).collect::<Vec<_>>().join(":")
}

/// The program in a language.
fn peer(language: &str) -> Command {
    match language {
        "python" => {
            let mut command = python("main.py");
            command.env("PYTHONPATH", COMPILED.join("gen-py"));
            command
        }
        "cpp" => Command::new(COMPILED.join("peer")),
        _ => {
            let mut command = Command::new("java");
            let classes = format!("{}:{}", COMPILED.join("classes").display(), jars());
            // As little of the machine as can be: many of these run at once.
            command.args(["-Xshare:auto", "-XX:TieredStopAtLevel=1", "-Xmx128m", "-cp", &classes, "Main"]);
            command
        }
    }
}

/// Where a language's backend listens.
fn port(form: usize, language: usize) -> u16 {
    5000 + 100 * form as u16 + language as u16
}

/// What a client prints.
fn expected(client: &str) -> String {
    let names = (0..3).map(|at| format!("127.0.0.1:{}", port(0, at))).collect::<Vec<_>>();
    let placement = Placement::new(Scheme::Modulo, names.iter().map(|name| (name.as_str(), 1)));
    let of = |key: u64| LANGUAGES[key as usize % 3];
    let mut text = String::new();
    for key in 0..3 * u64::from(KEYS) {
        text += &format!("whose {key} {} payload of {client}\n", of(key));
    }
    for key in 0..u64::from(KEYS) {
        let who = of(key);
        let name = format!("name-{key}");
        let named = placement.backend(name.as_bytes(), &Key::Bytes(0..name.len())).unwrap();
        text += &format!(
            "named {key} {} {}\n\
             wide {key} {}\n\
             noted {key} {}\n\
             mirror {key} True\n\
             fail {key} {who} {key}\n\
             keyless 7 shunt: the message has no key\n\
             unknown 1\n",
            LANGUAGES[named],
            3 * (6 + 4 * key),
            of((key << 33) % 3),
            key % 4,
        );
    }
    text + "large True\n"
}

/// Clients in all languages at once, of backends in all languages.
fn between(engine: &str) {
    let net = Arc::new(Net::new());
    let _backends: Vec<Server> = LANGUAGES
        .iter()
        .enumerate()
        .map(|(at, language)| {
            let ports = [port(0, at), port(1, at)];
            let mut command = peer(language);
            command.args(["serve", language]);
            command
                .args(FORMS.iter().zip(ports).flat_map(|(form, port)| [port.to_string(), form.to_string()]));
            Server::start(&net, &mut command, &ports)
        })
        .collect();
    for (at, form) in FORMS.iter().enumerate() {
        let shell = Shell::new();
        let backends: String = (0..3)
            .map(|language| format!("[[backend]]\naddress = '127.0.0.1:{}'\n", port(at, language)))
            .collect();
        let file = shell.file("backends.toml", backends);
        let arguments =
            ["builtin:thrift-forwarder", "--engine", engine, "--backends", file.to_str().unwrap()];
        let serving = Serving::start_in(&net, &shell, &arguments);
        std::thread::scope(|scope| {
            for language in LANGUAGES.iter().chain(&["cpp", "python"]).enumerate() {
                let (number, language) = language;
                let serving = &serving;
                scope.spawn(move || {
                    let client = format!("{language}-{number}-{form}");
                    let mut command = peer(language);
                    command.args(["call", &client, "4000", form, &KEYS.to_string()]);
                    let said = output(&serving.net, &mut command);
                    assert_eq!(said, expected(&client), "{engine}, {form}: {:#}", serving.status());
                });
            }
        });
        serving.await_status(|status| status["open-connections"] == 0);
        let status = serving.status();
        assert_eq!(status["kernel"]["messages"] == 0, engine == "user", "{status:#}");
        assert_eq!(status["drops"], serde_json::json!({ "missing-field": 5 * KEYS }), "{status:#}");
    }
}

#[test]
fn thrift_in_three_languages_moved_between_the_engines() {
    between("auto");
}

#[test]
fn thrift_in_three_languages_in_the_kernel() {
    between("kernel");
}

#[test]
fn thrift_in_three_languages_in_user_space() {
    between("user");
}
