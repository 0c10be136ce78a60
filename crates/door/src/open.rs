//! The whole of it, in the order in which it is done.

use std::ffi::CString;
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::libc::{self, user_regs_struct};
use nix::unistd::{Pid, getppid};
use rustix::param::linux_hwcap;
use shunt_abi::door::{BLOCK, Begin, CONTROL};

use crate::elf::{EXECUTABLE, File, WRITABLE};
use crate::library::Library;
use crate::text::{self, Site};
use crate::tracee::{self, Tracee};
use crate::{By, Closed};

const PAGE: u64 = 4096;
/// Room for one stub: what moves, and what leads to the library and back.
const STUB: u64 = 128;
/// At the beginning of the stubs' memory: where the library is.
const POINTER: u64 = 64;

/// A program whose calls can be led to shunt, and the library that they are led to.
pub struct Door {
    program: File,
    library: File,
    path: CString,
    sites: Vec<Site>,
    switches_stacks: bool,
}

/// Has whoever becomes the program stop there. Until then it must not be waited for.
pub fn wait(by: By) -> Result<(), Closed> {
    match by {
        By::Thread(thread) => tracee::seize(Pid::from_raw(thread), false),
        By::Child(parent) => tracee::seize(Pid::from_raw(parent), true),
    }
}

impl Door {
    /// Looks at the files.
    pub fn plan(program: &Path, library: &Path) -> Result<Door, Closed> {
        const FSGSBASE: usize = 1 << 1;
        if linux_hwcap().1 & FSGSBASE == 0 {
            return Err(Closed::NoGs);
        }
        let path = CString::new(library.as_os_str().as_bytes()).map_err(|_| Closed::Library)?;
        let (program, library) = (File::open(program)?, File::open(library)?);
        let numbers = Library::numbers(&library)?;
        let sites = text::sites(&program, &numbers)?;
        let switches_stacks = program.is_of_go()?;
        Ok(Door { program, library, path, sites, switches_stacks })
    }

    /// Waits until the one that [`wait`] was told of has become the program; opens the door, and lets it go.
    pub fn open(self) -> Result<(), Closed> {
        let mut tracee = Tracee::at_exec()?;
        let process = tracee.process();
        if !self.program.is_at(Path::new(&format!("/proc/{process}/exe"))) {
            return Err(Closed::Other);
        }
        let registers = tracee.registers()?;
        let bias = registers.rip.wrapping_sub(self.program.entry()?);
        let block = map(&mut tracee, 0, BLOCK as u64, WRITABLE)?;
        let base = map(&mut tracee, 0, Library::len(&self.library), WRITABLE)?;
        let begin = block + PAGE;
        let environment = begin + offset_of!(Begin, environment) as u64;
        let path = begin + size_of::<Begin>() as u64;
        let is_childs = getppid() == process;
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
            if is_childs { std::process::id().into() } else { 0 },
        ];
        tracee.write(begin, &told.map(u64::to_le_bytes).concat())?;
        lead(&mut tracee, &self.program, &self.sites, bias, library.offer.called)?;
        let started = user_regs_struct {
            rip: library.offer.start,
            rbx: begin,
            gs_base: control,
            ..tracee.registers()?
        };
        tracee.set_registers(started)
    }
}

/// Maps the library's file, and changes what its place and its program change. `path` is put at an address first.
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

/// Leads the program's calls to `called`.
fn lead(tracee: &mut Tracee, program: &File, sites: &[Site], bias: u64, called: u64) -> Result<(), Closed> {
    let len = (POINTER + STUB * sites.len() as u64).next_multiple_of(PAGE);
    let first =
        program.segments.iter().filter(|segment| segment.is_loaded()).map(|segment| segment.address).min();
    let lowest = (first.ok_or(Closed::Elf)? & !(PAGE - 1)).wrapping_add(bias);
    let stubs = map_below(tracee, lowest, len)?;
    let mut content = called.to_le_bytes().to_vec();
    let mut jumps = Vec::new();
    for (index, site) in sites.iter().enumerate() {
        let offset = POINTER + STUB * index as u64;
        let stub = site.stub(bias, stubs + offset, stubs)?;
        if stub.len() as u64 > STUB {
            return Err(Closed::Call(site.from));
        }
        content.resize(offset as usize, 0xcc);
        content.extend(stub);
        jumps.push((site.from.wrapping_add(bias), site.jump(bias, stubs + offset)?));
    }
    tracee.write(stubs, &content)?;
    protect(tracee, stubs, len, EXECUTABLE)?;
    // Last of all: from here on every call goes there.
    jumps.iter().try_for_each(|(at, jump)| tracee.write(*at, jump))
}

/// Memory below the program, which nothing grows into.
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
