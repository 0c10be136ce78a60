//! The steps of an entry and of a detachment, in their order.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use shunt_abi::plan::{self, Plan, State, WORDS};
use shunt_abi::reason::Reason;
use shunt_sys::Errno;

use crate::image::Image;
use crate::others::{self, Others};
use crate::process::{Mapping, Process};
use crate::sweep::{self, Redirects};
use crate::threads::{Caller, Libc, Place, Thread, each_register};
use crate::{Attached, Detached, Refusal, View};
use crate::{sockets, waits};

/// How often a step is tried that depends on what threads are doing.
const TRIES: u32 = 100;
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(10);
/// The stack that a function of the dynamic linker or of the library may need.
const STACK: u64 = 96 * 1024;
/// The code by which glibc's signal handlers return: `mov $15, %rax; syscall`.
const RESTORER: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// Functions that wait for a condition, without a lock.
const CONDITIONS: [&str; 4] =
    ["pthread_cond_wait", "pthread_cond_timedwait", "pthread_cond_clockwait", "sem_wait"];
/// Functions that wait for descriptors.
const WAITS: [&str; 7] = ["epoll_wait", "epoll_pwait", "epoll_pwait2", "poll", "ppoll", "select", "pselect"];
const LIBRARY: &str = "libshunt.so";

/// The functions and the code of a program's libc that the steps need.
struct Known {
    libc: Libc,
    dlopen: u64,
    create_thread: u64,
    waits: Vec<Range<u64>>,
    linker: Vec<Range<u64>>,
}

fn file_is(path: &Path, name: &str) -> bool {
    path.file_name().is_some_and(|file| file == name)
}

fn code_of(mappings: &[Mapping], is_it: impl Fn(&Path) -> bool) -> Vec<Range<u64>> {
    let code = mappings.iter().filter(|one| one.is_executable && one.inode != 0 && is_it(&one.path));
    code.map(|one| one.range.clone()).collect()
}

fn is_libc(path: &Path) -> bool {
    file_is(path, "libc.so.6")
        || path.file_name().is_some_and(|file| {
            file.to_str().is_some_and(|file| file.starts_with("libc-2.") && file.ends_with(".so"))
        })
}

fn is_linker(path: &Path) -> bool {
    path.file_name()
        .and_then(|file| file.to_str())
        .is_some_and(|file| file.starts_with("ld-linux") || file.starts_with("ld-2.") || file == "ld.so")
}

impl Known {
    fn find(process: &Process) -> Result<Known, Refusal> {
        let mappings = process.mappings()?;
        let image = Image::find(process, &mappings, is_libc)?.ok_or(Refusal::Libc)?;
        let function = |name| image.symbol(name)?.map(|range| range.start).ok_or(Refusal::Libc);
        let ranges = |names: &[&str]| -> Result<Vec<Range<u64>>, Refusal> {
            names.iter().filter_map(|name| image.symbol(name).transpose()).collect()
        };
        let libc = Libc {
            code: code_of(&mappings, is_libc),
            restorer: image.code(&RESTORER)?.ok_or(Refusal::Libc)?,
            conditions: ranges(&CONDITIONS)?,
        };
        Ok(Known {
            dlopen: function("dlopen")?,
            create_thread: function("pthread_create")?,
            waits: ranges(&WAITS)?,
            linker: code_of(&mappings, is_linker),
            libc,
        })
    }
}

/// The library in the program.
struct Library {
    plan: u64,
    image: Image,
}

impl Library {
    fn find(process: &Process) -> Result<Option<Library>, Refusal> {
        let mappings = process.mappings()?;
        let Some(image) = Image::find(process, &mappings, |path| file_is(path, LIBRARY))? else {
            return Ok(None);
        };
        let plan = image.symbol("shunt_plan")?.ok_or(Refusal::Version)?.start;
        Ok(Some(Library { plan, image }))
    }

    fn function(&self, name: &str) -> Result<u64, Refusal> {
        Ok(self.image.symbol(name)?.ok_or(Refusal::Version)?.start)
    }

    fn read(&self, process: &Process) -> Result<Plan, Refusal> {
        let plan = Plan::parse(&process.words::<WORDS>(self.plan)?);
        if plan.version.load(Relaxed) != u64::from(shunt_abi::VERSION) {
            return Err(Refusal::Version);
        }
        Ok(plan)
    }

    /// Returns the plan of a library that can be switched on.
    fn read_inert(&self, process: &Process) -> Result<Plan, Refusal> {
        let plan = self.read(process)?;
        match plan.state() {
            Some(State::Inert | State::Prepared) if !is_on(process, &plan)? => Ok(plan),
            Some(State::Leaving | State::Left) => Err(Refusal::HasLeft),
            Some(_) => Err(Refusal::Already),
            None => Err(Refusal::Version),
        }
    }
}

fn is_on(process: &Process, plan: &Plan) -> Result<bool, Refusal> {
    let switch = plan.switch.load(Relaxed);
    if switch == 0 {
        return Ok(false);
    }
    let mut word = [0; 4];
    process.read(switch, &mut word)?;
    Ok(u32::from_ne_bytes(word) == 1)
}

/// Borrows any thread of the program.
fn borrow<'a>(process: &'a Process, libc: &'a Libc) -> Result<Caller<'a>, Refusal> {
    for _ in 0..TRIES {
        for id in process.threads()? {
            if let Some(caller) = Caller::borrow(process, libc, id, STACK)? {
                return Ok(caller);
            }
        }
        std::thread::sleep(PAUSE);
    }
    Err(Refusal::Busy)
}

fn text(path: &Path) -> Vec<u8> {
    [path.as_os_str().as_bytes(), b"\0"].concat()
}

/// See [`crate::attach`].
pub(crate) fn attach(
    pid: u32,
    library: &Path,
    broker: &Path,
    settings: &[(&str, &[u8])],
) -> Result<Attached, Refusal> {
    let process = Process::open(pid)?;
    // An attachment that was killed has left the library. It is used, wherever it is.
    let mut library = library.to_owned();
    if let Some(present) = Library::find(&process)? {
        present.read_inert(&process)?;
        if present.image.is_replaced {
            return Err(Refusal::Version);
        }
        library.clone_from(&present.image.path);
    }
    process.check()?;
    let known = Known::find(&process)?;
    for path in [&library, broker] {
        if !process.sees(path) {
            return Err(Refusal::OutOfReach(path.to_owned()));
        }
    }
    let mut caller = borrow(&process, &known.libc)?;
    let present = load(&process, &known, &caller, &library)?;
    present.read_inert(&process)?;
    let mut list = Vec::new();
    for (name, value) in settings {
        list.extend([name.as_bytes(), b"=", value, b"\0"].concat());
    }
    list.push(0);
    let prepare = present.function("shunt_prepare")?;
    let mut is_checked = false;
    for attempt in 0..TRIES {
        if attempt > 0 {
            std::thread::sleep(PAUSE);
        }
        let objects = Objects::of(&process, &present.read(&process)?)?;
        caller.call(prepare, &list, |settings| [settings, 0, 0, 0])?;
        let plan = present.read(&process)?;
        match plan::Refusal::parse(plan.refusal.load(Relaxed)) {
            None if plan.state() == Some(State::Prepared) => {}
            Some(plan::Refusal::Loading) => continue,
            _ if plan.state() == Some(State::On) => return Err(Refusal::Already),
            refusal => return Err(unfit(&process, &plan, refusal)),
        }
        // Before the first preparation, the place of the linker's list is unknown.
        let Some(objects) = objects else { continue };
        if !is_checked {
            sweep::check_shared(&process, &Redirects::new(&pairs(&process, &plan.redirects)?))?;
            is_checked = true;
        }
        if let Some(attached) = enter(&process, &known, &mut caller, &present, &plan, &objects)? {
            return Ok(attached);
        }
    }
    Err(Refusal::Unsafe)
}

/// Loads the library.
fn load(process: &Process, known: &Known, caller: &Caller<'_>, library: &Path) -> Result<Library, Refusal> {
    const RTLD_NOW: u64 = 2;
    const RTLD_GLOBAL: u64 = 0x100;
    const RTLD_NODELETE: u64 = 0x1000;
    let failed = caller
        .call(known.dlopen, &text(library), |path| [path, RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE, 0, 0])?;
    Library::find(process)?.ok_or_else(|| {
        let why = failed.map(|(number, errno)| {
            format!(": its system call {number} failed ({})", std::io::Error::from(errno))
        });
        Refusal::NotLoaded(why.unwrap_or_default())
    })
}

fn unfit(process: &Process, plan: &Plan, refusal: Option<plan::Refusal>) -> Refusal {
    match refusal {
        Some(plan::Refusal::Sanitizer) => Refusal::Unfit("the runtime of a sanitizer is in it".into()),
        Some(plan::Refusal::Interposed) => {
            let mut name = vec![0; plan.about[1].load(Relaxed).min(64) as usize];
            let name = match process.read(plan.about[0].load(Relaxed), &mut name) {
                Ok(()) => String::from_utf8_lossy(&name).into_owned(),
                Err(_) => String::from("a function"),
            };
            Refusal::Unfit(format!(
                "it, or a library in it, has a function {name} in place of libc's: start it with `shunt run`"
            ))
        }
        _ => Refusal::Version,
    }
}

/// The objects that the dynamic linker has loaded.
#[derive(Debug, PartialEq, Eq)]
struct Objects(Vec<[u64; 2]>);

impl Objects {
    /// Reads the dynamic linker's list. Returns `None` if it is being changed, or not known yet.
    fn of(process: &Process, plan: &Plan) -> Result<Option<Objects>, Refusal> {
        const MOST: usize = 1 << 16;
        let linker = plan.linker.load(Relaxed);
        if linker == 0 {
            return Ok(None);
        }
        let [_, mut next, _, state, ..] = process.words::<5>(linker)?;
        let mut objects = Vec::new();
        while next != 0 && objects.len() < MOST {
            let [base, _, _, following] = process.words::<4>(next)?;
            objects.push([next, base]);
            next = following;
        }
        Ok((state as u32 == 0).then_some(Objects(objects)))
    }
}

fn pairs(process: &Process, [at, count]: &[AtomicU64; 2]) -> Result<Vec<[u64; 2]>, Refusal> {
    process.pairs(at.load(Relaxed), count.load(Relaxed))
}

/// Stops all threads, redirects the calls, and switches the library on. Returns `None` if that
/// would not be safe now.
fn enter(
    process: &Process,
    known: &Known,
    caller: &mut Caller<'_>,
    library: &Library,
    plan: &Plan,
    objects: &Objects,
) -> Result<Option<Attached>, Refusal> {
    let mut others = Others::default();
    others.ask(process)?;
    let begin = Instant::now();
    let threads = stop_others(process, caller.id())?;
    if Objects::of(process, plan)?.as_ref() != Some(objects) {
        return Ok(None);
    }
    let redirects = Redirects::new(&pairs(process, &plan.redirects)?);
    others.ask(process)?;
    let held = others::descriptors(process.pid).ok_or(Refusal::Gone)?;
    let mut instances = waits::list(process, &held, &others);
    waits::note_call(process, &mut instances, caller.id(), caller.own_call())?;
    for thread in &threads {
        let registers = thread.registers()?;
        if known.linker.iter().any(|range| range.contains(&registers.rip)) {
            return Ok(None);
        }
        match thread.place()? {
            Place::Call(number) => {
                let [rdi, rsi, rdx] = [registers.rdi, registers.rsi, registers.rdx];
                let arguments = [rdi, rsi, rdx, registers.r10, registers.r8, registers.r9];
                waits::note_call(process, &mut instances, thread.id, (number, arguments))?;
            }
            Place::EndOfCall => {}
            Place::Code => {
                if waits::is_about_to_wait(process, &known.waits, registers.rip, registers.rsp) {
                    return Ok(None);
                }
            }
        }
    }
    let room = plan.room[1].load(Relaxed) as usize;
    let mut words = waits::describe(&instances);
    let left = room.saturating_sub(words.len());
    words.extend(sockets::describe(&sockets::list(&held, &others), left));
    if words.len() > room {
        return Err(Refusal::Version);
    }
    let mut changes = sweep::find(process, &redirects, &pairs(process, &plan.untouched)?)?;
    changes.extend(pairs(process, &plan.slots)?);
    // From here on, the program changes. Each change alone does no harm, as the library is off.
    for [at, hook] in &changes {
        process.write(*at, &hook.to_ne_bytes())?;
    }
    for thread in &threads {
        let mut registers = thread.registers()?;
        if each_register(&mut registers, |value| redirects.of(value)) {
            thread.set_registers(&registers)?;
        }
    }
    caller.change_own(|value| redirects.of(value))?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    process.write(plan.room[0].load(Relaxed), &bytes)?;
    caller.call(library.function("shunt_commit")?, &[], |_| [0; 4])?;
    let connections = library.read(process)?.connections.load(Relaxed);
    process.write(plan.switch.load(Relaxed), &1_u32.to_ne_bytes())?;
    let state = std::mem::offset_of!(Plan, state) as u64;
    process.write(library.plan + state, &(State::On as u64).to_ne_bytes())?;
    drop(threads);
    Ok(Some(Attached {
        stopped: begin.elapsed(),
        redirected: changes.len(),
        instances: instances.len(),
        connections: connections as usize,
    }))
}

/// Stops all threads but the caller.
fn stop_others(process: &Process, caller: i32) -> Result<Vec<Thread>, Refusal> {
    let mut threads: Vec<Thread> = Vec::new();
    loop {
        let is_new = |id: &i32| *id != caller && !threads.iter().any(|thread| thread.id == *id);
        let new: Vec<i32> = process.threads()?.into_iter().filter(is_new).collect();
        let mut is_complete = true;
        for id in new {
            if let Some(thread) = Thread::stop(id)? {
                threads.push(thread);
                // It may have made another thread before it stopped.
                is_complete = false;
            }
        }
        if is_complete {
            return Ok(threads);
        }
    }
}

/// See [`crate::view`].
pub(crate) fn view(pid: u32) -> Result<Option<View>, Refusal> {
    /// More than a few paths need.
    const MOST: u64 = 64 * 1024;
    let process = Process::look(pid)?;
    let Some(library) = Library::find(&process)? else { return Ok(None) };
    let plan = library.read(&process)?;
    let [at, len] = plan.brokers.each_ref().map(|word| word.load(Relaxed));
    if len == 0 || len > MOST {
        return Ok(None);
    }
    let mut paths = vec![0; len as usize];
    process.read(at, &mut paths)?;
    let brokers = paths.split(|byte| *byte == 0).filter(|path| !path.is_empty());
    Ok(Some(View {
        // Only a preparation shows the switch.
        is_entered: plan.switch.load(Relaxed) != 0 && is_on(&process, &plan)?,
        brokers: brokers.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect(),
        unreached: match plan.unreached.load(Relaxed) {
            0 => None,
            errno => Some(Errno::from_raw_os_error(errno as i32)),
        },
        off: Reason::parse(plan.off.load(Relaxed) as u16).filter(|reason| *reason != Reason::None),
        bypasses: Some(plan.bypasses.load(Relaxed)).filter(|address| *address != 0),
        has_registered: (plan.version.load(Relaxed) == u64::from(shunt_abi::VERSION))
            .then(|| plan.registered.load(Relaxed) != 0),
    }))
}

/// See [`crate::detach`].
pub(crate) fn detach(pid: u32) -> Result<Detached, Refusal> {
    const LIMIT: Duration = Duration::from_secs(5);
    let process = Process::open(pid)?;
    let library = Library::find(&process)?.ok_or(Refusal::NotUnder)?;
    let state = || Ok::<_, Refusal>(library.read(&process)?.state());
    match state()? {
        Some(State::On) => {}
        Some(State::Leaving | State::Left) => return Err(Refusal::HasLeft),
        _ => return Err(Refusal::NotUnder),
    }
    process.check()?;
    let known = Known::find(&process)?;
    let leave = library.function("shunt_leave")?;
    let caller = borrow(&process, &known.libc)?;
    // The first word gets the id of the new thread, which blocks all signals, as this one does now.
    let failed = caller.call(known.create_thread, &[0; 16], |place| [place, 0, leave, 0])?;
    drop(caller);
    let until = Instant::now() + LIMIT;
    while state()? != Some(State::Left) {
        if Instant::now() > until {
            return match (state()?, failed) {
                (Some(State::On), Some((_, errno))) => Err(Refusal::Kernel("pthread_create", errno)),
                _ => Ok(Detached::Leaving),
            };
        }
        std::thread::sleep(PAUSE);
    }
    Ok(Detached::Left)
}
