//! The objects installed on this machine, judged. Code without its own system calls must not be
//! judged as code with some, or programs lose shared memory for nothing. Also compares lengths of
//! instructions with another decoder.
#![cfg(target_arch = "x86_64")]

use shunt_census::{Frames, Memory, Numbers, Verdict, is_data, judge};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An object as it is loaded at address 0.
struct Image {
    bytes: Vec<u8>,
    file: File,
    first: u64,
    code: Vec<Range<u64>>,
}

struct File(Vec<u8>);

impl Memory for Image {
    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        read(&self.bytes, address, into)
    }
}

impl Memory for File {
    fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        read(&self.0, offset, into)
    }
}

fn read(bytes: &[u8], from: u64, into: &mut [u8]) -> bool {
    let from = from as usize;
    let found = from.checked_add(into.len()).and_then(|to| bytes.get(from..to));
    found.map(|bytes| into.copy_from_slice(bytes)).is_some()
}

impl Image {
    fn load(path: &Path) -> Option<Image> {
        let file = fs::read(path).ok()?;
        let number = |at: usize, len: usize| {
            let mut bytes = [0; 8];
            bytes[..len].copy_from_slice(file.get(at..at + len)?);
            Some(u64::from_le_bytes(bytes))
        };
        if !file.starts_with(b"\x7fELF\x02\x01") || number(18, 2)? != 62 {
            return None;
        }
        let (headers, count) = (number(32, 8)? as usize, number(56, 2)? as usize);
        let mut image =
            Image { bytes: Vec::new(), file: File(Vec::new()), first: u64::MAX, code: Vec::new() };
        for header in (0..count).map(|index| headers + index * 56) {
            const LOADED: u64 = 1;
            if number(header, 4)? != LOADED {
                continue;
            }
            let [offset, address, len] = [8, 16, 32].map(|at| number(header + at, 8));
            let (offset, address, len) = (offset? as usize, address? as usize, len? as usize);
            image.bytes.resize(image.bytes.len().max(address + len), 0);
            image.bytes[address..address + len].copy_from_slice(file.get(offset..offset + len)?);
            image.first = image.first.min(address as u64 & !0xfff);
            if number(header + 4, 4)? & 1 != 0 {
                image.code.push(address as u64..(address + len) as u64);
            }
        }
        image.file = File(file);
        Some(image)
    }

    fn judge(&self) -> Verdict {
        // Every call with a known number matters, except futex and the calls that end a thread.
        let mut numbers = [u32::MAX; 16];
        for harmless in [202_usize, 60, 231, 318] {
            numbers[harmless / 32] &= !(1 << (harmless % 32));
        }
        let frames = Frames::of_object(self, self.first);
        let mut buffer = vec![0; 128 * 1024];
        let is_data = |at| is_data(self, self.first, &self.file, at);
        let judged = self
            .code
            .iter()
            .map(|code| judge(self, code.clone(), frames.as_ref(), &Numbers(&numbers), is_data, &mut buffer));
        judged.fold(Verdict::Clean, |all, one| if all == Verdict::Clean { one } else { all })
    }
}

/// Returns the first existing file for each pattern.
fn installed(patterns: &[&str]) -> Vec<PathBuf> {
    let find = |pattern: &&str| {
        let (directory, name) = pattern.rsplit_once('/').unwrap();
        let entries = fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path());
        entries
            .filter(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)))
            .min()
    };
    patterns.iter().filter_map(find).collect()
}

const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

#[test]
fn programs_without_calls_of_their_own_are_clean() {
    let mut patterns: Vec<String> = [
        "libcrypto.so.3",
        "libssl.so.3",
        "libstdc++.so.6",
        "libz.so.1",
        "libpcre2-8.so.0",
        "libgcc_s.so.1",
        "libuv.so.1",
        "libsystemd.so.0",
        "liblua5",
        "libevent-2.1",
        "libjemalloc.so.2",
        "libcurl.so.4",
        "libxml2.so.2",
        "libgcrypt.so.20",
        // Its constants are in the same segment as its code, and some of them look like calls.
        "libLLVM-",
    ]
    .map(|name| format!("{LIBRARIES}/{name}"))
    .to_vec();
    let programs = [
        "/usr/bin/node",
        "/usr/bin/python3",
        "/usr/bin/php8",
        "/usr/bin/perl",
        "/usr/bin/memcached",
        "/usr/bin/redis-server",
        "/usr/sbin/nginx",
        "/usr/sbin/haproxy",
        "/usr/sbin/mariadbd",
        "/usr/sbin/varnishd",
        "/usr/sbin/apache2",
        "/usr/lib/postgresql/15/bin/postgres",
        "/usr/lib/erlang/erts-13.1.5/bin/beam.smp",
        "/usr/lib/jvm/java-17-openjdk-amd64/lib/server/libjvm.so",
        "/usr/lib/jvm/java-17-openjdk-amd64/lib/libnio.so",
    ];
    patterns.extend(programs.map(str::to_owned));
    let files = installed(&patterns.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(files.len() >= 5, "too few are installed: {files:?}");
    let judged = files.iter().filter_map(|file| Some((file, Image::load(file)?.judge())));
    let wrong: Vec<_> = judged.filter(|(_, verdict)| *verdict != Verdict::Clean).collect();
    assert!(wrong.is_empty(), "{wrong:x?}");
}

#[test]
fn libc_makes_calls() {
    let files =
        installed(&["/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"]);
    for file in &files {
        assert!(matches!(Image::load(file).unwrap().judge(), Verdict::MayBypass(_)), "{}", file.display());
    }
}
