//! Counts what the threads of a service share on the path of a message: cache lines that one of
//! them writes and another one uses, and atomic instructions that lock such a line.
//!
//! The test executes four threads of the built `shunt` instruction by instruction, while clients of
//! each thread send messages, and decodes what each instruction reads and writes. So it needs no
//! second processor, and counts the same on a busy machine.
#![cfg(target_arch = "x86_64")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use common::Shell;
use common::serving::Serving;
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, InstructionInfoFactory, OpAccess, Register};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use shunt_netns::Net;
use shunt_sys::trace::{self, Registers};

const THREADS: usize = 4;
/// Messages of each thread while instructions are counted.
const MESSAGES: usize = 8;
const LINE: u64 = 64;
/// `__WCLONE` and `__WNOTHREAD` of waitpid(2): threads, but not the process itself, and only those
/// that the calling thread traces, not those of other tests.
const OWN_THREADS: u32 = 0x8000_0000 | 0x2000_0000;
/// The longest x86 instruction, in bytes.
const LONGEST: usize = 15;

/// What the threads did with a cache line.
#[derive(Debug, Default)]
struct Line {
    users: BTreeSet<i32>,
    writers: BTreeSet<i32>,
    /// Atomic instructions.
    locks: u64,
    /// The addresses of instructions that wrote it, or used it where another thread writes it.
    places: BTreeSet<u64>,
}

/// The counts of one service.
#[derive(Debug, Default)]
struct Seen {
    lines: BTreeMap<u64, Line>,
    instructions: u64,
}

impl Seen {
    fn record(
        &mut self,
        thread: i32,
        instruction: &Instruction,
        factory: &mut InstructionInfoFactory,
        registers: &Registers,
    ) {
        self.instructions += 1;
        let is_atomic = instruction.has_lock_prefix()
            || matches!(instruction.code(), Code::Xchg_rm64_r64 | Code::Xchg_rm32_r32 | Code::Xchg_rm8_r8);
        for memory in factory.info(instruction).used_memory() {
            let value = |register, _, _| Some(value(register, registers));
            // A count of repetitions that is not known is taken for one.
            let Some(address) = memory.virtual_address(0, value) else { continue };
            let is_write = matches!(
                memory.access(),
                OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
            );
            if memory.access() == OpAccess::NoMemAccess {
                continue;
            }
            let last = address + (memory.memory_size().size() as u64).max(1) - 1;
            for line in address / LINE..=last / LINE {
                let line = self.lines.entry(line).or_default();
                line.users.insert(thread);
                if is_write {
                    line.writers.insert(thread);
                }
                line.locks += u64::from(is_atomic);
                line.places.insert(registers.rip);
            }
        }
    }

    /// Returns the lines that a thread writes and another one uses.
    fn shared(&self) -> impl Iterator<Item = (&u64, &Line)> {
        self.lines.iter().filter(|(_, line)| !line.writers.is_empty() && line.users.len() > 1)
    }
}

/// Returns the value of a register, of those that addresses are made of.
fn value(register: Register, registers: &Registers) -> u64 {
    match register {
        Register::RAX => registers.rax,
        Register::RBX => registers.rbx,
        Register::RCX => registers.rcx,
        Register::RDX => registers.rdx,
        Register::RSI => registers.rsi,
        Register::RDI => registers.rdi,
        Register::RBP => registers.rbp,
        Register::RSP => registers.rsp,
        Register::R8 => registers.r8,
        Register::R9 => registers.r9,
        Register::R10 => registers.r10,
        Register::R11 => registers.r11,
        Register::R12 => registers.r12,
        Register::R13 => registers.r13,
        Register::R14 => registers.r14,
        Register::R15 => registers.r15,
        Register::FS => registers.fs_base,
        Register::GS => registers.gs_base,
        // The other segments begin at 0.
        _ => 0,
    }
}

/// Executes the threads by single instructions, until their process is killed.
fn step(process: u32, threads: &[i32], is_over: &AtomicBool) -> Seen {
    let own = WaitOptions::from_bits_retain(OWN_THREADS);
    let memory = File::open(format!("/proc/{process}/mem")).unwrap();
    let mut seen = Seen::default();
    for thread in threads {
        trace::seize(*thread).unwrap();
        trace::interrupt(*thread).unwrap();
    }
    let (mut left, mut factory) = (threads.len(), InstructionInfoFactory::new());
    while left > 0 {
        let (thread, status) = wait(own).unwrap().expect("it waits");
        let thread = thread.as_raw_nonzero().get();
        if !status.stopped() {
            left -= 1;
            continue;
        }
        // A thread may be killed at any time.
        let Ok(registers) = trace::registers(thread) else { continue };
        let mut bytes = [0; LONGEST];
        let Ok(count) = memory.read_at(&mut bytes, registers.rip) else { continue };
        let mut decoder = Decoder::with_ip(64, &bytes[..count], registers.rip, DecoderOptions::NONE);
        if !is_over.load(Relaxed) {
            seen.record(thread, &decoder.decode(), &mut factory, &registers);
        }
        let _ = trace::step(thread);
    }
    seen
}

/// Returns the threads that serve connections, once they have given themselves their names.
fn serving_threads(process: u32) -> Vec<i32> {
    let is_serving = |thread: &String| {
        let name = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/comm")).unwrap_or_default();
        (0..THREADS).any(|number| name.trim() == format!("serve-{number}"))
    };
    loop {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let threads = tasks.map(|task| task.unwrap().file_name().into_string().unwrap());
        let threads: Vec<i32> = threads.filter(is_serving).map(|thread| thread.parse().unwrap()).collect();
        if threads.len() == THREADS {
            return threads;
        }
        std::thread::yield_now();
    }
}

/// Returns how often a thread has waited.
fn waits(process: u32, thread: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

/// A byte of an answer that may be any byte.
const ANY: u8 = b'?';

/// A request, and its answer.
type Pair = (Vec<u8>, Vec<u8>);

/// Sends the request of each connection in turn, and reads all of its answer.
fn exchange(clients: &mut [TcpStream], of: impl Fn(usize) -> Pair) {
    for (number, client) in clients.iter_mut().enumerate() {
        let (request, answer) = of(number);
        client.write_all(&request).unwrap();
        let mut got = vec![0; answer.len()];
        client.read_exact(&mut got).unwrap();
        let is_right = got.iter().zip(&answer).all(|(got, right)| *right == ANY || got == right);
        assert!(is_right, "{}", got.escape_ascii());
    }
}

/// Counts what threads share while each connection makes the exchange `of` its number. It has made
/// the exchange `first` before.
fn count(
    service: &str,
    more: &[&str],
    net: Net,
    first: impl Fn(usize) -> Pair,
    of: impl Fn(usize) -> Pair + Sync,
) {
    let shell = Shell::new();
    let arguments = [service, "--engine", "user", "--drain", "0", "--threads", &THREADS.to_string()];
    let program = shunt_built::release_dir().join("shunt");
    let serving = Serving::start_program(&program, &Arc::new(net), &shell, &[&arguments, more].concat());
    let process = serving.child.id();
    let threads = serving_threads(process);
    // The kernel distributes connections among the threads at random.
    let mut by_thread = BTreeMap::new();
    while by_thread.len() < THREADS {
        let mut client = [serving.connect()];
        exchange(&mut client, &first);
        let before: Vec<u64> = threads.iter().map(|thread| waits(process, *thread)).collect();
        (0..20).for_each(|_| exchange(&mut client, &of));
        let after = threads.iter().map(|thread| waits(process, *thread));
        let more = after.zip(before).map(|(after, before)| after - before);
        let (_, thread) = more.zip(&threads).max().unwrap();
        by_thread.entry(*thread).or_insert(client);
    }
    let mut clients: Vec<TcpStream> = by_thread.into_values().flatten().collect();
    (0..3).for_each(|_| exchange(&mut clients, &first));
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let is_over = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..MESSAGES {
                exchange(&mut clients, &of);
            }
            is_over.store(true, Relaxed);
            // A thread that went on would die of the step that it has not reported yet.
            kill_process(Pid::from_raw(process.cast_signed()).unwrap(), Signal::KILL).unwrap();
        });
        step(process, &threads, &is_over)
    });
    let messages = (THREADS * MESSAGES) as f64;
    let shared: Vec<_> = seen.shared().collect();
    let locks: u64 = shared.iter().map(|(_, line)| line.locks).sum();
    let atomics: u64 = seen.lines.values().map(|line| line.locks).sum();
    println!(
        "{service}, for each of {messages} messages on {} threads: {:.0} instructions, {:.2} of them atomic, {:.2} of \
         those at cache lines that threads share; {} such lines in all",
        threads.len(),
        seen.instructions as f64 / messages,
        atomics as f64 / messages,
        locks as f64 / messages,
        shared.len()
    );
    for (line, used) in &shared {
        let places: Vec<String> = used.places.iter().map(|place| located(*place, &maps)).collect();
        println!("  {:#x} ({}): {}", *line * LINE, located(*line * LINE, &maps), places.join(" "));
    }
    assert!(seen.instructions > 0);
    assert!(shared.is_empty(), "threads share cache lines");
}

/// Returns the name of the mapping at an address, with the offset in its file.
fn located(address: u64, maps: &str) -> String {
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let find = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (first, last) = words[0].split_once('-').unwrap();
        let (first, last) = (hex(first), hex(last));
        let name = words.get(5).and_then(|path| path.rsplit('/').next()).unwrap_or("memory");
        (first..last).contains(&address).then(|| format!("{name}+{:#x}", address - first + hex(words[2])))
    };
    maps.lines().find_map(find).unwrap_or_else(|| "?".to_owned())
}

#[test]
fn threads_of_an_echo_share_nothing_that_they_write() {
    let of = |_| (b"hello\n".to_vec(), b"hello\n".to_vec());
    count("builtin:line-echo", &[], Net::new(), of, of);
}

#[test]
fn threads_of_the_cache_share_nothing_that_they_write_for_a_hit() {
    // The cache stores when an item was last used. So each connection reads another item.
    let set = |client: usize| (format!("set key{client} 0 0 5\r\nvalue\r\n").into(), b"STORED\r\n".to_vec());
    let get = |client| {
        let answer = format!("VALUE key{client} 0 5\r\nvalue\r\nEND\r\n");
        (format!("get key{client}\r\n").into(), answer.into())
    };
    count("builtin:cache", &[], Net::new(), set, get);
}

/// Starts two backends that send `answer` to each message, and writes a file with them and `more`.
fn backends(net: &Net, shell: &Shell, answer: &'static [u8], more: &str) -> String {
    let serve = |mut stream: TcpStream| {
        let mut got = [0; 4096];
        while stream.read(&mut got).is_ok_and(|count| count > 0) && stream.write_all(answer).is_ok() {}
    };
    let listeners = net.inside(|| [5000, 5001].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap()));
    for listener in listeners {
        std::thread::spawn(move || {
            listener.incoming().for_each(|stream| drop(std::thread::spawn(move || serve(stream.unwrap()))));
        });
    }
    let text = "[health]\ninterval = 3600.0\n[[backend]]\naddress = '127.0.0.1:5000'\n\
                [[backend]]\naddress = '127.0.0.1:5001'\n";
    shell.file("backends.toml", [text, more].concat()).display().to_string()
}

#[test]
fn threads_of_a_router_share_nothing_that_they_write() {
    let (net, shell) = (Net::new(), Shell::new());
    let file = backends(&net, &shell, b"END\r\n", "");
    let get = |client| (format!("get key{client}\r\n").into(), b"END\r\n".to_vec());
    count("builtin:memcached-router", &["--backends", &file], net, get, get);
}

#[test]
fn threads_of_the_proxy_share_nothing_that_they_write() {
    const REPLY: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let (net, shell) = (Net::new(), Shell::new());
    let file = backends(&net, &shell, REPLY, "");
    let get = |_| (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), REPLY.to_vec());
    count("builtin:http-proxy", &["--backends", &file], net, get, get);
}

#[test]
fn threads_of_the_proxy_share_nothing_that_they_write_for_stored_replies() {
    // The first answer is the backend's reply, and has the form of one that was stored: an age,
    // with as many digits for a while, and a date, which is not in the past.
    const REPLY: &[u8] = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=9000\r\n\
        Date: Fri, 01 Jan 2100 00:00:00 GMT\r\nAge: 1000\r\nContent-Length: 2\r\n\r\nok";
    let (net, shell) = (Net::new(), Shell::new());
    let file = backends(&net, &shell, REPLY, "[[route]]\npath = '/'\npool = 'default'\ncache = {}\n");
    let answer = str::from_utf8(REPLY).unwrap().replace(" 1000", " ????");
    // A thread owns a stored reply while it sends it. So each connection asks for another one.
    let get = |client| (format!("GET /{client} HTTP/1.1\r\nHost: a\r\n\r\n").into(), answer.clone().into());
    count("builtin:http-proxy", &["--backends", &file], net, get, get);
}
