//! Libraries that a program loads while it has connections on shared memory (L11). Every byte must
//! arrive in its place, whichever code writes it. A library that is bound past the shim is
//! redirected to it, and the program stays on shared memory. A library with inline system calls
//! keeps the program on TCP.

use shunt_compat::{Way, both, compile, compile_cpp, wait_for_reason};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);

fn loads(kind: &'static str, flags: &'static [&'static str], way: Way) {
    load_from(kind, "./plugin", flags, way);
}

fn load_from(kind: &'static str, library: &'static str, flags: &'static [&'static str], way: Way) {
    both(LIMIT, move |host| {
        compile(host, "loads", &["-ldl"]);
        compile(host, "plugin", &[&["-shared", "-fPIC"], flags, &["-ldl"]].concat());
        let port = host.port();
        let number = port.to_string();
        let server = host.program("./loads").args(["server", &number]).start("server");
        let transport = host.watch_transport();
        let client = host
            .program("./loads")
            .args(["client", &number, kind, library, "first", "second"])
            .start("client");
        transport.wait_for_shm(port, 1, LIMIT);
        host.write("first", "");
        match way {
            Way::Shm => transport.wait_for_shm(port, 2, LIMIT),
            Way::Tcp(reason) => wait_for_reason(host, &transport, port, client.pid(), reason),
        }
        if flags.contains(&"-DINLINE")
            && let Some(text) = host.explain(client.pid())
        {
            assert!(text.replace('\n', " ").contains("/plugin, at offset 0x"), "{text}");
        }
        host.write("second", "");
        let ended = client.wait(LIMIT);
        assert!(ended.success(), "{}\n{}", ended.stderr, transport.report(port));
        assert_eq!(ended.stdout, "y\ny\n", "{}", transport.report(port));
        if let Way::Tcp(_) = way {
            assert!(transport.on_shm(port) <= 1, "{}", transport.report(port));
        }
        assert!(server.wait(LIMIT).success());
    });
}

#[test]
fn library_that_is_bound_to_libc_directly_is_led_to_the_shim() {
    loads("deep", &["-Wl,-z,now"], Way::Shm);
}

#[test]
fn library_whose_calls_are_bound_when_they_are_made_is_too() {
    loads("lazy", &["-Wl,-z,lazy"], Way::Shm);
}

#[test]
fn library_that_is_bound_as_usual_changes_nothing() {
    loads("usual", &[], Way::Shm);
}

#[test]
fn functions_that_libc_is_asked_for_are_led_to_the_shim() {
    load_from("handle", "libc.so.6", &[], Way::Shm);
}

#[test]
fn functions_of_a_version_are_too() {
    load_from("version", "libc.so.6", &[], Way::Shm);
}

#[test]
fn functions_that_a_library_is_asked_for_which_has_them_from_libc_are_too() {
    load_from("handle", "./plugin", &[], Way::Shm);
}

#[test]
fn library_that_asks_for_the_next_function_is_led_to_the_shim() {
    loads("usual", &["-DASKS=RTLD_NEXT"], Way::Shm);
}

#[test]
fn library_that_is_bound_to_libc_directly_and_asks_for_a_function_is_too() {
    loads("deep", &["-DASKS=RTLD_DEFAULT"], Way::Shm);
}

#[test]
fn exception_of_a_constructor_reaches_the_caller_of_dlopen() {
    both(LIMIT, |host| {
        let built = compile_cpp(host, "throws", &["-shared", "-fPIC", "-DLIBRARY"]);
        std::fs::rename(built, host.path("thrower")).expect("it has been built");
        compile_cpp(host, "throws", &["-ldl"]);
        let ended = host.program("./throws").arg("./thrower").run("throws", LIMIT);
        assert!(ended.success(), "{}", ended.stderr);
        ended.stdout
    });
}

#[cfg(target_arch = "x86_64")]
#[test]
fn library_with_system_calls_of_its_own_keeps_the_program_on_tcp() {
    loads("usual", &["-DINLINE"], Way::Tcp("own_calls"));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn constants_beside_code_are_not_taken_for_system_calls() {
    loads("usual", &["-DCONSTANTS", "-Wl,-z,noseparate-code"], Way::Shm);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn library_with_a_libc_of_its_own_keeps_the_program_on_tcp() {
    loads("apart", &[], Way::Tcp("own_calls"));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn memory_that_becomes_executable_keeps_the_program_on_tcp() {
    loads("mapped", &[], Way::Tcp("own_calls"));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn memory_that_is_writable_and_executable_keeps_the_program_on_tcp() {
    loads("writable", &[], Way::Tcp("own_calls"));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn executable_mapping_that_grows_keeps_the_program_on_tcp() {
    loads("grown", &[], Way::Tcp("own_calls"));
}
