//! The steps of redirecting a program's calls, in their order.

use std::ffi::CString;
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::libc::{self, user_regs_struct};
use nix::unistd::{Pid, getppid};
use rustix::param::linux_hwcap;
use shunt_abi::intercept::{BELOW, BLOCK, Begin, Below, CONTROL};

use crate::elf::{EXECUTABLE, File, WRITABLE};
use crate::library::Library;
use crate::own::Own;
use crate::text::{self, Site};
use crate::tracee::{self, Tracee};
use crate::{By, Closed};

const PAGE: u64 = 4096;
/// Bytes of a stub: the moved instructions, the jump to the library, and the jump back.
const STUB: u64 = 128;
/// The code that makes a call unmodified: `jmp rcx`.
const LET_THROUGH: [u8; 2] = [0xff, 0xe1];

/// A program whose calls can be redirected, and the library that will receive them.
pub struct Interception {
    program: File,
    library: File,
    path: CString,
    sites: Vec<Site>,
    switches_stacks: bool,
    /// The dynamic linker loads the library, so that only the calls must be redirected.
    has_linker: bool,
}

/// Attaches to the thread that will execute the program, so that it stops there. No process may
/// wait for that thread before.
pub fn wait(by: By) -> Result<(), Closed> {
    match by {
        By::Thread(thread) => tracee::seize(Pid::from_raw(thread), false),
        By::Child(parent) => tracee::seize(Pid::from_raw(parent), true),
    }
}

impl Interception {
    /// Analyses the files of the program and the library.
    pub fn plan(program: &Path, library: &Path) -> Result<Interception, Closed> {
        const FSGSBASE: usize = 1 << 1;
        if linux_hwcap().1 & FSGSBASE == 0 {
            return Err(Closed::NoGs);
        }
        let path = CString::new(library.as_os_str().as_bytes()).map_err(|_| Closed::Library)?;
        let (program, library) = (File::open(program)?, File::open(library)?);
        let (switches_stacks, has_linker) = (program.is_of_go()?, program.has_linker());
        if has_linker {
            check_linked(&program)?;
        }
        let own = if has_linker && !switches_stacks { Some(Own::of(&program)?) } else { None };
        let numbers = Library::numbers(&library)?;
        if own.as_ref().is_some_and(|own| !own.matters(&numbers)) {
            return Err(Closed::NoCalls);
        }
        let sites = text::sites(&program, own.as_ref(), &numbers)?;
        Ok(Interception { program, library, path, sites, switches_stacks, has_linker })
    }

    /// Returns `true` if the program has a libc, and also makes calls directly that the library
    /// must receive. Returns quickly if it does not have such calls.
    pub fn is_needed(program: &Path, library: &Path) -> Result<bool, Closed> {
        let program = File::open(program)?;
        if !program.has_linker() || program.is_of_go()? {
            return Ok(false);
        }
        match Own::of(&program) {
            Ok(own) => Ok(own.matters(&Library::numbers(&File::open(library)?)?)),
            Err(Closed::NoCalls | Closed::TooMuch) => Ok(false),
            Err(closed) => Err(closed),
        }
    }

    /// Waits until the thread given to [`wait`] has executed the program. Then redirects the calls
    /// and lets the program run.
    pub fn open(self) -> Result<(), Closed> {
        let mut tracee = Tracee::at_exec()?;
        let process = tracee.process();
        if !self.program.is_at(Path::new(&format!("/proc/{process}/exe"))) {
            return Err(Closed::Other);
        }
        let bias = tracee.entry()?.wrapping_sub(self.program.entry()?);
        let beside = if getppid() == process { std::process::id().into() } else { 0 };
        if self.has_linker {
            return self.lead_linked(&mut tracee, bias, beside);
        }
        let registers = tracee.registers()?;
        let block = map(&mut tracee, 0, BLOCK as u64, WRITABLE)?;
        let base = map(&mut tracee, 0, Library::len(&self.library), WRITABLE)?;
        let begin = block + PAGE;
        let environment = begin + offset_of!(Begin, environment) as u64;
        let path = begin + size_of::<Begin>() as u64;
        let library = Library::load(&self.library, base, environment)?;
        place(&mut tracee, &library, base, (&self.path, path))?;
        let control = block + (BLOCK - CONTROL) as u64;
        let (own_data, in_file, own_len) = library.own_data()?;
        tracee.write(control - own_len, &library.own_data_content()?)?;
        tracee.write(control, &control.to_le_bytes())?;
        let (first, count) = library.first_functions()?;
        let mut arguments = [0; 8];
        tracee.read(registers.rsp, &mut arguments)?;
        let told: [u64; size_of::<Begin>() / 8] = [
            registers.rsp,
            registers.rip,
            own_data,
            in_file,
            own_len,
            first,
            count,
            self.switches_stacks.into(),
            registers.rsp + 8 * (u64::from_le_bytes(arguments) + 2),
            path,
            beside,
        ];
        tracee.write(begin, &told.map(u64::to_le_bytes).concat())?;
        let stubs = self.map_stubs(&mut tracee, bias)?;
        tracee.write(stubs, &library.offer.called.to_le_bytes())?;
        protect(&mut tracee, stubs, PAGE, 0)?;
        self.lead(&mut tracee, bias, stubs)?;
        let started = user_regs_struct {
            rip: library.offer.start,
            rbx: begin,
            gs_base: control,
            ..tracee.registers()?
        };
        tracee.set_registers(started)
    }

    /// Redirects the calls of a program whose dynamic linker will load the library. Until the
    /// library has started, the stubs let calls through.
    fn lead_linked(&self, tracee: &mut Tracee, bias: u64, beside: u64) -> Result<(), Closed> {
        let stubs = self.map_stubs(tracee, bias)?;
        let below: [u64; size_of::<Below>() / 8] = [stubs + PAGE, BELOW, self.switches_stacks.into(), beside];
        tracee.write(stubs, &below.map(u64::to_le_bytes).concat())?;
        self.lead(tracee, bias, stubs)?;
        let told = user_regs_struct { gs_base: stubs, ..tracee.registers()? };
        tracee.set_registers(told)
    }

    /// Maps memory below the program: a page with the address to which calls are redirected, then
    /// the stubs.
    fn map_stubs(&self, tracee: &mut Tracee, bias: u64) -> Result<u64, Closed> {
        let loaded = self.program.segments.iter().filter(|segment| segment.is_loaded());
        let first = loaded.map(|segment| segment.address).min().ok_or(Closed::Elf)?;
        map_below(tracee, (first & !(PAGE - 1)).wrapping_add(bias), PAGE + self.len_of_stubs())
    }

    fn len_of_stubs(&self) -> u64 {
        (STUB * (1 + self.sites.len() as u64)).next_multiple_of(PAGE)
    }

    /// Writes the stubs and the jumps to them. The page at `stubs` holds the address that they jump
    /// to.
    fn lead(&self, tracee: &mut Tracee, bias: u64, stubs: u64) -> Result<(), Closed> {
        let mut content = LET_THROUGH.to_vec();
        let mut jumps = Vec::new();
        for (index, site) in self.sites.iter().enumerate() {
            let offset = STUB * (1 + index as u64);
            let at = stubs + PAGE + offset;
            let stub = site.stub(bias, at, stubs)?;
            if stub.len() as u64 > STUB {
                return Err(Closed::Call(site.from));
            }
            content.resize(offset as usize, 0xcc);
            content.extend(stub);
            jumps.push((site.from.wrapping_add(bias), site.jump(bias, at)?));
        }
        tracee.write(stubs + PAGE, &content)?;
        protect(tracee, stubs + PAGE, self.len_of_stubs(), EXECUTABLE)?;
        // The jumps come last: from here on, calls are redirected.
        jumps.iter().try_for_each(|(at, jump)| tracee.write(*at, jump))
    }
}

/// Checks that the library can answer calls on the threads of a program with a dynamic linker.
fn check_linked(program: &File) -> Result<(), Closed> {
    if !is_x86_feature_detected!("xsave") {
        return Err(Closed::NoXsave);
    }
    if program.changes_its_code()? {
        return Err(Closed::ChangesCode);
    }
    // Without cgo, Go's threads have a thread pointer of Go's own, which the library cannot use.
    if program.is_of_go()? && !program.names(b"pthread_create")? {
        return Err(Closed::OwnThreads);
    }
    Ok(())
}

/// Maps the library's file in the program, and writes the pages that differ from the file. Writes
/// `path` to `at` first, for the open call.
fn place(
    tracee: &mut Tracee,
    library: &Library,
    base: u64,
    (path, at): (&CString, u64),
) -> Result<(), Closed> {
    const NOWHERE: u64 = libc::AT_FDCWD as u64;
    tracee.write(at, path.as_bytes_with_nul())?;
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let file = tracee.call("open", libc::SYS_openat, [NOWHERE, at, flags as u64, 0, 0, 0])?;
    for part in library.parts() {
        let kind = libc::MAP_PRIVATE | libc::MAP_FIXED;
        let of_file = [base + part.address, part.in_file, access(part.flags), kind as u64, file, part.offset];
        tracee.call("mmap", libc::SYS_mmap, of_file)?;
        protect(tracee, base + part.address, part.content.len() as u64, part.flags)?;
        let mut present = vec![0; part.content.len()];
        tracee.read(base + part.address, &mut present)?;
        let pages = part.content.chunks(PAGE as usize).zip(present.chunks(PAGE as usize));
        for (index, (page, present)) in pages.enumerate() {
            if page != present {
                tracee.write(base + part.address + index as u64 * PAGE, page)?;
            }
        }
    }
    tracee.call("close", libc::SYS_close, [file, 0, 0, 0, 0, 0]).map(drop)
}

/// Maps memory below the program, at a distance where neither the heap nor a stack grows.
fn map_below(tracee: &mut Tracee, lowest: u64, len: u64) -> Result<u64, Closed> {
    const TRIES: u64 = 64;
    const STEP: u64 = 16 * PAGE;
    for back in 1..=TRIES {
        let Some(at) = lowest.checked_sub(len + back * STEP) else { break };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let arguments = [at, len, access as u64, flags as u64, u64::MAX, 0];
        match tracee.call("mmap", libc::SYS_mmap, arguments) {
            Ok(found) if found == at => return Ok(at),
            Err(Closed::Gone) => return Err(Closed::Gone),
            _ => {}
        }
    }
    Err(Closed::NoRoom)
}

fn map(tracee: &mut Tracee, at: u64, len: u64, flags: u32) -> Result<u64, Closed> {
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    tracee.call("mmap", libc::SYS_mmap, [at, len, access(flags), kind as u64, u64::MAX, 0])
}

fn protect(tracee: &mut Tracee, at: u64, len: u64, flags: u32) -> Result<(), Closed> {
    let len = len.next_multiple_of(PAGE);
    tracee.call("mprotect", libc::SYS_mprotect, [at, len, access(flags), 0, 0, 0]).map(drop)
}

fn access(flags: u32) -> u64 {
    let writable = if flags & WRITABLE != 0 { libc::PROT_WRITE } else { 0 };
    let executable = if flags & EXECUTABLE != 0 { libc::PROT_EXEC } else { 0 };
    (libc::PROT_READ | writable | executable) as u64
}
