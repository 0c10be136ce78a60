//! Checks for features that the local path requires. Each check tries the feature.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, sockopt};
use shunt_broker::SYSTEM_SOCKET;
use shunt_sys::tcp::{self, Opener};

use super::{Check, State};
use crate::broker::{self, Unusable};
use crate::library;

const NEWER_LINUX: &str = "use Linux 5.14 or later";

pub(super) fn checks() -> Vec<Check> {
    vec![
        tried("memfd sealing", "the memory that two programs share", memfd_sealing(), NEWER_LINUX),
        tried("eventfd", "waking the other end", doorbell(), NEWER_LINUX),
        tried(
            "loopback TCP",
            "finding the byte at which a connection changes from TCP to shared memory",
            stream_offsets(),
            "bring the loopback interface up (`ip link set lo up`) and use Linux 4.19 or later",
        ),
        tried("SO_COOKIE", "identifying a socket in a way that no program can forge", cookie(), NEWER_LINUX),
        tried("SO_NETNS_COOKIE", "distinguishing network namespaces", namespace_cookie(), NEWER_LINUX),
        tried(
            "sock_diag",
            "finding out which sockets are open",
            socket_table(),
            "load the kernel module: `modprobe tcp_diag`",
        ),
        entering(),
        own_broker(),
        system_broker(),
    ]
}

fn tried(name: &'static str, meaning: &'static str, result: Result<String>, advice: &str) -> Check {
    match result {
        Ok(found) => Check::ok(name, meaning, found),
        Err(error) => Check::ok(name, meaning, format!("{error:#}")).lacking(State::Missing, advice),
    }
}

fn memfd_sealing() -> Result<String> {
    let memfd = memfd_create("shunt-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    ftruncate(&memfd, 4096)?;
    fcntl_add_seals(&memfd, seals)?;
    ensure!(fcntl_get_seals(&memfd)?.contains(seals), "the seals do not hold");
    ensure!(ftruncate(&memfd, 0).is_err(), "a sealed memfd could be shrunk");
    Ok("works".into())
}

fn doorbell() -> Result<String> {
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    rustix::io::write(&bell, &1_u64.to_ne_bytes())?;
    Ok("works".into())
}

fn stream_offsets() -> Result<String> {
    let (mut one, mut two) = loopback()?;
    one.write_all(b"seven b")?;
    two.read_exact(&mut [0; 3])?;
    let (sent, read) = (tcp::sent(&one, Opener::Us)?, tcp::read(&two)?);
    ensure!(sent == Some(7) && read == 3, "the kernel counts {sent:?} and {read} bytes instead of 7 and 3");
    Ok("works, and counts its bytes".into())
}

fn loopback() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on 127.0.0.1")?;
    let client = TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(1))
        .context("cannot connect to 127.0.0.1")?;
    Ok((client, listener.accept()?.0))
}

fn cookie() -> Result<String> {
    let (one, two) = loopback()?;
    ensure!(sockopt::socket_cookie(&one)? != sockopt::socket_cookie(&two)?, "two sockets have one cookie");
    Ok("works".into())
}

fn namespace_cookie() -> Result<String> {
    let (one, _two) = loopback()?;
    Ok(format!("works, this is namespace {}", shunt_sys::identity::namespace(one.as_fd())?))
}

/// Requests the listening TCP sockets from the kernel, and reads only its first answer.
fn socket_table() -> Result<String> {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const NLM_F_REQUEST_DUMP: u16 = 0x301;
    const NLMSG_ERROR: u16 = 2;
    const AF_INET: u8 = 2;
    const IPPROTO_TCP: u8 = 6;
    const LISTEN: u32 = 1 << 10;
    let mut request = Vec::new();
    request.extend_from_slice(&72_u32.to_ne_bytes());
    request.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(&[AF_INET, IPPROTO_TCP, 0, 0]);
    request.extend_from_slice(&LISTEN.to_ne_bytes());
    request.resize(72, 0);

    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::SOCK_DIAG))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_secs(1)))?;
    rustix::net::send(&socket, &request, SendFlags::empty())?;
    let mut answer = vec![0; 16 * 1024];
    let (length, _) = rustix::net::recv(&socket, answer.as_mut_slice(), RecvFlags::empty())?;
    ensure!(length >= 20, "the kernel's answer is too short");
    if u16::from_ne_bytes([answer[4], answer[5]]) == NLMSG_ERROR {
        let errno = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
        bail!("{}", std::io::Error::from_raw_os_error(-errno));
    }
    Ok("answers".into())
}

fn entering() -> Check {
    let result = shim();
    // The dynamic linker's error is: "version `GLIBC_2.28' not found".
    let is_old = |error: &anyhow::Error| error.to_string().contains("version `GLIBC_");
    let advice = match &result {
        Err(error) if is_old(error) => {
            "use a system with glibc 2.28 or later, or a shunt that was built on this one"
        }
        _ => "install shunt with `make install`, or name the file in SHUNT_LIB",
    };
    tried("libshunt.so", "what `shunt run` loads into programs", result, advice)
}

/// Loads the shim into a program and checks that it is mapped. The dynamic linker only prints a
/// line if it cannot load it.
fn shim() -> Result<String> {
    let library = library::find()?;
    let output = Command::new("/bin/cat")
        .arg("/proc/self/maps")
        .env("LD_PRELOAD", &library)
        .env(shunt_abi::env::TRANSPORT, "auto")
        .env(shunt_abi::env::BROKER, "/nonexistent")
        .stdin(Stdio::null())
        .output()
        .context("cannot run /bin/cat")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    let loaded = String::from_utf8_lossy(&output.stdout).contains(&*library.to_string_lossy());
    ensure!(
        output.status.success() && loaded,
        "{} cannot be loaded into /bin/cat ({}){}",
        library.display(),
        output.status,
        complaint.lines().next().map(|line| format!(": {line}")).unwrap_or_default()
    );
    Ok(format!("{} can be loaded into programs", library.display()))
}

fn own_broker() -> Check {
    const NAME: &str = "own broker";
    const MEANING: &str = "finding the two ends of connections between your programs";
    match shunt_broker::user_socket() {
        Err(error) => Check::ok(NAME, MEANING, error.to_string())
            .lacking(State::Missing, "set XDG_RUNTIME_DIR to a directory of your own"),
        Ok(path) => match broker::probe(&path) {
            Err(Unusable::Absent) => Check::ok(NAME, MEANING, "not running; `shunt run` starts it"),
            reached => answering(NAME, MEANING, &path, reached, State::Missing),
        },
    }
}

fn system_broker() -> Check {
    const NAME: &str = "system broker";
    const MEANING: &str = "finding the two ends of connections between programs of different users";
    let path = Path::new(SYSTEM_SOCKET);
    match broker::probe(path) {
        Err(Unusable::Absent) => Check::ok(
            NAME,
            MEANING,
            "not running; needed only for programs of different users, and for containers",
        ),
        reached => answering(NAME, MEANING, path, reached, State::Limited),
    }
}

fn answering(
    name: &'static str,
    meaning: &'static str,
    path: &Path,
    reached: Result<u32, Unusable>,
    state: State,
) -> Check {
    let unusable = |why: String| {
        Check::ok(name, meaning, format!("{}: {why}", path.display()))
            .lacking(state, "stop what listens there, and restart the broker and its programs")
    };
    match reached.map(|_| shunt_broker::status(path)) {
        Err(error) => unusable(error.to_string()),
        Ok(Err(error)) => unusable(error.to_string()),
        Ok(Ok(snapshot)) => Check::ok(
            name,
            meaning,
            format!("runs at {}, protocol version {}", path.display(), snapshot.version),
        ),
    }
}
