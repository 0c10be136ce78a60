//! Creates a service from scratch with the commands of docs/serve.md, until the kernel has verified
//! it. Needs root and clang.

use std::path::Path;
use std::process::{Command, Output};

fn shunt(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shunt"))
        .args(arguments)
        .current_dir(directory)
        .output()
        .expect("it runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Runs a command that must succeed, and returns its output.
fn succeed(directory: &Path, arguments: &[&str]) -> String {
    let output = shunt(directory, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    said(&output)
}

fn fail(directory: &Path, arguments: &[&str]) -> String {
    let output = shunt(directory, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", said(&output));
    said(&output)
}

/// Returns the commands of a section of docs/serve.md that make a service, and the other lines of its
/// blocks.
fn section(heading: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    let document = include_str!("../../../docs/serve.md");
    let heading = format!("{heading}\n");
    let section = document.split("\n## ").find(|section| section.starts_with(&heading)).unwrap();
    let makes = |line: &&str| {
        ["new", "build", "check"].iter().any(|word| line.starts_with(&format!("shunt serve {word}")))
    };
    section.lines().filter_map(|line| line.strip_prefix("    ")).partition(makes)
}

/// Runs the three commands of a section, and returns the output of the last.
fn follow(commands: &[&str]) -> String {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(commands.len(), 3, "{commands:?}");
    let mut last = String::new();
    for command in commands {
        last = succeed(directory.path(), &command.split_whitespace().skip(1).collect::<Vec<_>>());
    }
    last
}

#[test]
fn the_document_leads_from_a_template_to_a_verified_service() {
    let (commands, promised) = section("From a template");
    assert_eq!(follow(&commands).lines().collect::<Vec<_>>(), promised);
}

#[test]
fn the_document_leads_to_a_stateful_service() {
    let last = follow(&section("State").0);
    assert!(last.contains("6 tests passed, in user space and in the kernel"), "{last}");
}

#[test]
fn the_document_leads_to_a_content_store() {
    let last = follow(&section("Content stores").0);
    assert!(last.contains("14 tests passed, in user space and in the kernel"), "{last}");
}

/// A service that answers each line, with `body` in its `decide`.
fn line_service(before: &str, body: &str) -> String {
    format!(
        "#include <shunt/line.h>\n{before}\n\
         static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)\n{{\n{body}\n}}\n\
         SHUNT_SERVICE(.name = \"mine\", .parse = line_message, .decide = decide);\n"
    )
}

fn write(directory: &Path, text: &str) {
    std::fs::write(directory.join("mine.c"), text).unwrap();
}

#[test]
fn state_that_the_halves_would_not_share_is_refused_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let map = "#ifdef __bpf__\nstruct { __uint(type, BPF_MAP_TYPE_ARRAY); __type(key, __u32); __type(value, __u64);\n\
               __uint(max_entries, 1); } seen SEC(\".maps\");\n#endif";
    let look = "__u32 key = 0;\n#ifdef __bpf__\nif (bpf_map_lookup_elem(&seen, &key)) shunt_drop(verdict);\n#endif\n\
                shunt_echo(verdict);";
    let cases = [
        ("static __u64 count;", "count++; if (count > 3) shunt_echo(verdict);", "`count` at mine.c:2"),
        ("", "static __u32 calls = 7;\nif (calls++ > 9) shunt_echo(verdict);", "`calls` at mine.c:5"),
        (map, look, "`seen` at mine.c:4"),
    ];
    for (before, body, place) in cases {
        write(directory.path(), &line_service(before, body));
        let said = fail(directory.path(), &["serve", "build", "mine.c"]);
        assert!(said.contains(place) && said.contains("shunt_state"), "{said}");
        assert!(!directory.path().join("mine.bpf.o").exists());
    }
    write(
        directory.path(),
        &line_service("static const char text[] = \"yes\\n\";", "shunt_write_all(verdict, text, 4);"),
    );
    succeed(directory.path(), &["serve", "build", "mine.c"]);
    succeed(directory.path(), &["serve", "check", "mine.bpf.o"]);
}

#[test]
fn an_answer_that_does_not_fit_is_an_error_of_the_build_or_a_refusal() {
    let directory = tempfile::tempdir().unwrap();
    let long = "static const char text[300] = {1};";
    write(directory.path(), &line_service(long, "shunt_write_all(verdict, text, sizeof(text));"));
    let said = fail(directory.path(), &["serve", "build", "mine.c"]);
    assert!(said.contains("mine.c:5") && said.contains("at most 256 bytes"), "{said}");
    // The sum of two answers is known only at run time.
    let twice = "shunt_write_all(verdict, text, 200);\nshunt_write_all(verdict, text, 200);";
    write(directory.path(), &line_service(long, twice));
    std::fs::write(directory.path().join("mine.tests"), "decide \"a\\n\" = refuse too-long\n").unwrap();
    succeed(directory.path(), &["serve", "build", "mine.c"]);
    let said = succeed(directory.path(), &["serve", "check", "mine.bpf.o"]);
    assert!(said.contains("1 tests passed, in user space and in the kernel"), "{said}");
}

#[test]
fn an_endless_loop_is_named_with_its_line_and_not_run() {
    let directory = tempfile::tempdir().unwrap();
    let endless = "__u8 byte = 1;\nwhile (byte != 0)\nshunt_peek(socket, 0, &byte, 1);\nshunt_echo(verdict);";
    write(directory.path(), &line_service("", endless));
    succeed(directory.path(), &["serve", "build", "mine.c"]);
    let said = fail(directory.path(), &["serve", "check", "mine.bpf.o"]);
    assert!(said.contains("a loop whose end cannot be foreseen") && said.contains("mine.c:"), "{said}");
    for engine in ["auto", "user"] {
        let control = directory.path().join("control");
        let arguments = ["serve", "mine.bpf.o", "--listen", "127.0.0.1:0", "--engine", engine, "--control"];
        let said = fail(directory.path(), &[&arguments[..], &[control.to_str().unwrap()]].concat());
        assert!(said.contains("--unverified"), "{said}");
    }
}

#[test]
fn a_template_overwrites_nothing() {
    let directory = tempfile::tempdir().unwrap();
    succeed(directory.path(), &["serve", "new", "mine"]);
    assert!(fail(directory.path(), &["serve", "new", "mine"]).contains("exists"));
    assert!(fail(directory.path(), &["serve", "new", "../mine"]).contains("no name for a service"));
}

#[test]
fn a_failing_test_is_told_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    succeed(directory.path(), &["serve", "new", "mine"]);
    std::fs::write(directory.path().join("mine.tests"), "# wrong\nparse \"a\\n\" = 7\n").unwrap();
    succeed(directory.path(), &["serve", "build", "mine.c"]);
    let said = fail(directory.path(), &["serve", "check", "mine.bpf.o"]);
    assert!(said.contains("mine.tests: line 2, in user space: 2 instead of 7"), "{said}");
    assert!(said.contains("mine.tests: line 2, in kernel space: 2 instead of 7"), "{said}");
}

/// Builds a service with `body` as the body of parse.
fn build_parse(directory: &Path, body: &str) -> Output {
    let source = format!(
        "#include <shunt/service.h>\nstatic int parse(struct shunt_socket *socket)\n{{\n{body}\n}}\n\
         static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)\n{{\n\tshunt_echo(verdict);\n}}\n\
         SHUNT_SERVICE(.name = \"bad\", .parse = parse, .decide = decide);\n"
    );
    std::fs::write(directory.join("bad.c"), source).unwrap();
    shunt(directory, &["serve", "build", "bad.c"])
}

#[test]
fn what_the_verifier_refuses_is_told_with_its_line_and_its_meaning() {
    let directory = tempfile::tempdir().unwrap();
    let endless = "\tint sum = 0;\n\t__u8 byte;\n\tfor (__u32 at = 0; at < shunt_available(socket); at++)\n\
        \t\tif (!shunt_peek(socket, at, &byte, 1))\n\t\t\tsum += byte;\n\treturn sum;";
    let beyond = "\t__u8 bytes[8] = {}, at = 0;\n\tshunt_peek(socket, 0, &at, 1);\n\tshunt_peek(socket, 1, bytes, 8);\n\
        \treturn ((volatile __u8 *)bytes)[at];";
    for (body, line, advice) in
        [(endless, "\n  at ", "shunt_loop"), (beyond, "bad.c:7", "compared with its size")]
    {
        let built = build_parse(directory.path(), body);
        assert!(built.status.success(), "{}", said(&built));
        let said = fail(directory.path(), &["serve", "check", "bad.bpf.o"]);
        assert!(said.contains("the kernel does not accept `parse`"), "{said}");
        assert!(said.contains(advice), "{said}");
        // Since Linux 6.10, the verifier reports the line.
        assert!(said.contains(line) || !said.contains("\n  at "), "{said}");
    }
}

#[test]
fn what_does_not_compile_is_told_as_the_compiler_says_it() {
    let directory = tempfile::tempdir().unwrap();
    let said_by = |body| said(&build_parse(directory.path(), body));
    assert!(said_by("\treturn nonsense;").contains("bad.c:4:9: error"), "{}", said_by("\treturn nonsense;"));
    let library = "\tchar bytes[200] = {}, other[200] = {};\n\tshunt_peek(socket, 0, bytes, 200);\n\
        \tshunt_peek(socket, 200, other, 200);\n\treturn __builtin_memcmp(bytes, other, 200);";
    assert!(said_by(library).contains("there is no memcmp in the kernel"), "{}", said_by(library));
}
