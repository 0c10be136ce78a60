//! How deep the stack can get below a function, along everything that it may call.

use std::collections::{BTreeMap, BTreeSet};

use crate::frame::{self, Frame, Value};
use crate::library::Library;

/// Where the methods begin in a table of them: after the destructor, the size and the alignment.
const METHODS: i64 = 24;

/// What the code does not show, and a person has looked at.
pub struct Reviewed {
    /// Functions that end the program, by the beginnings of their names: what they take does not matter.
    pub endings: &'static [&'static str],
    /// Functions that return one that lies behind the library in the link order, by their names' endings.
    pub lookups: &'static [&'static str],
    /// A function that calls what the program has given it, by a part of its name.
    pub programs: &'static [&'static str],
    /// Parts of the names of what is called by a pointer that something begins with.
    pub first: &'static [&'static str],
    /// Parts of the names of a function that calls by pointer, and of all that it may call so.
    pub pointers: &'static [(&'static str, &'static [&'static str])],
    /// A part of the name of a caller, and one of a callee that it never calls where the shim runs: its whole name, if that has no path.
    pub never: &'static [(&'static str, &'static str)],
    /// Caller and callee of a call that closes a circle, which goes round at most twice.
    pub circles: &'static [(&'static str, &'static str)],
}

/// The library with what is known of its functions.
pub struct Graph<'l> {
    library: &'l Library,
    reviewed: &'l Reviewed,
    frames: BTreeMap<u64, Frame>,
    /// By function: what it needs, and the callee that needs most of it.
    once: BTreeMap<u64, (i64, Option<u64>)>,
    twice: BTreeMap<u64, (i64, Option<u64>)>,
    /// What could not be answered.
    pub puzzles: BTreeSet<String>,
}

impl<'l> Graph<'l> {
    /// Nothing is looked at yet.
    pub fn new(library: &'l Library, reviewed: &'l Reviewed) -> Graph<'l> {
        Graph {
            library,
            reviewed,
            frames: BTreeMap::new(),
            once: BTreeMap::new(),
            twice: BTreeMap::new(),
            puzzles: BTreeSet::new(),
        }
    }

    /// The most stack that a call of `function` takes, its return address included.
    pub fn needs(&mut self, function: u64) -> i64 {
        self.measure(function, &mut Vec::new(), false);
        self.measure(function, &mut Vec::new(), true) + 8
    }

    /// The way on which it does: each function, with what is taken from there on.
    pub fn path(&self, function: u64) -> Vec<String> {
        let mut path = Vec::new();
        let mut seen = BTreeSet::new();
        let mut at = Some(function);
        while let Some(function) = at {
            let (need, next) = self.twice.get(&function).copied().unwrap_or_default();
            // What goes round has less to go the second time.
            let again = if seen.insert(function) { "" } else { " (again)" };
            path.push(format!("{need:6} {}{again}", self.library.name(function)));
            at = next.filter(|_| again.is_empty());
        }
        path
    }

    fn measure(&mut self, function: u64, above: &mut Vec<u64>, again: bool) -> i64 {
        let known = if again { &self.twice } else { &self.once };
        if let Some((need, _)) = known.get(&function) {
            return *need;
        }
        let library = self.library;
        if !self.frames.contains_key(&function) {
            let frame = frame::of(library, function);
            self.puzzles.extend(frame.puzzles.iter().cloned());
            self.frames.insert(function, frame);
        }
        above.push(function);
        let frame = &self.frames[&function];
        let calls: Vec<_> =
            frame.calls.iter().map(|call| (call.depth, call.at, call.callees.clone())).collect();
        let mut most = (frame.deepest, None);
        for (depth, at, callees) in calls {
            for callee in self.resolve(function, at, &callees) {
                let below = if self.closes_circle(function, callee) {
                    if again { self.measure(callee, &mut Vec::new(), false) } else { 0 }
                } else if above.contains(&callee) {
                    let circle: Vec<_> = above
                        .iter()
                        .skip_while(|one| **one != callee)
                        .map(|one| library.name(*one))
                        .collect();
                    self.puzzles.insert(format!("a circle: {}", circle.join(" -> ")));
                    0
                } else {
                    self.measure(callee, above, again)
                };
                if depth + below > most.0 {
                    most = (depth + below, Some(callee));
                }
            }
        }
        above.pop();
        let known = if again { &mut self.twice } else { &mut self.once };
        known.insert(function, most);
        most.0
    }

    fn closes_circle(&self, caller: u64, callee: u64) -> bool {
        let (caller, callee) = (self.library.name(caller), self.library.name(callee));
        self.reviewed.circles.iter().any(|(from, to)| caller.contains(from) && callee.contains(to))
    }

    /// Every function of ours that is at this place of some table of methods.
    fn methods(&self, offset: i64) -> BTreeSet<u64> {
        let is_table = |start: u64| {
            // A destructor or none; then size and alignment, which are no addresses.
            [8, 16].iter().all(|number| !self.library.linked.contains_key(&(start + number)))
        };
        let within = |(place, _): &(u64, u64)| is_table(place.wrapping_sub(offset as u64));
        let ours = |address: &u64| {
            let name = self.library.name(*address);
            // What a program without libc is given is listed, too, and is no method.
            name.contains("shunt") && !name.starts_with("shunt::door::")
                || name.starts_with("core::ops::function::FnOnce::call_once")
        };
        self.library.pointed_to().filter(within).map(|(_, function)| function).filter(ours).collect()
    }

    fn named(&self, parts: &[&str]) -> BTreeSet<u64> {
        let is = |name: &str| parts.iter().any(|part| name.contains(part));
        self.library.functions.iter().filter(|(_, one)| is(&one.name)).map(|(address, _)| *address).collect()
    }

    /// The functions of the library that a call may reach.
    fn resolve(&mut self, caller: u64, at: u64, callees: &BTreeSet<Value>) -> BTreeSet<u64> {
        let name = self.library.name(caller);
        let mut reached = BTreeSet::new();
        for callee in callees {
            match callee {
                Value::Local(address) => {
                    reached.insert(*address);
                }
                // What lies behind the library is the program's own, as is what libc takes for itself.
                Value::Import(_) | Value::Variable(_) | Value::Target(_) => {}
                Value::Field(offset) if *offset >= METHODS && name.contains("shunt") => {
                    reached.extend(self.methods(*offset));
                }
                Value::Result(of) if self.reviewed.lookups.iter().any(|one| of.ends_with(one)) => {}
                // A hook that jumps to what it is told of, see `hooks::trampoline`.
                Value::Result(of) if of.starts_with("shunt::hooks::") && of.contains("::before_") => {}
                Value::Field(0) => reached.extend(self.named(self.reviewed.first)),
                _ => {
                    if self.reviewed.programs.iter().any(|one| name.contains(*one)) {
                        continue;
                    }
                    if let Some((_, targets)) =
                        self.reviewed.pointers.iter().find(|(one, _)| name.contains(one))
                    {
                        reached.extend(self.named(targets));
                    } else {
                        self.puzzles.insert(format!("{at:#x}: who is called, {callee:?}, in {name}"));
                    }
                }
            }
        }
        let ends = |address: &u64| {
            self.reviewed.endings.iter().any(|one| self.library.name(*address).starts_with(one))
        };
        reached.retain(|address| !ends(address));
        reached.retain(|address| {
            let callee = self.library.name(*address);
            let is = |to: &str| callee == to || to.contains("::") && callee.contains(to);
            !self.reviewed.never.iter().any(|(from, to)| name.contains(from) && is(to))
        });
        reached
    }
}
