//! Computes the maximum stack depth below a function, over all functions that it may call.

use std::collections::{BTreeMap, BTreeSet};

use crate::frame::{self, Frame, Value};
use crate::library::Library;

/// Offset of the first method in a vtable: after the destructor, the size and the alignment.
const METHODS: i64 = 24;

/// Facts that the code does not show, and that a person has verified.
pub struct Reviewed {
    /// Prefixes of the names of functions that end the program. Their stack usage does not matter.
    pub endings: &'static [&'static str],
    /// Suffixes of the names of functions that return a function of a library later in the link
    /// order.
    pub lookups: &'static [&'static str],
    /// Parts of the names of functions that call a function of the program.
    pub programs: &'static [&'static str],
    /// Parts of the names of the functions that may be called by a pointer at the beginning of an
    /// object.
    pub first: &'static [&'static str],
    /// A part of the name of a function that calls by pointer, and of all functions that it may
    /// reach that way.
    pub pointers: &'static [(&'static str, &'static [&'static str])],
    /// Parts of the names of a caller and of a callee that it never calls where the shim runs. A
    /// callee without a path is compared as a whole name.
    pub never: &'static [(&'static str, &'static str)],
    /// The caller and callee of a call that closes a cycle, which is run through at most twice.
    pub circles: &'static [(&'static str, &'static str)],
}

/// The names that an entry of [`Reviewed`] stands for.
#[derive(Clone, Copy)]
pub enum Pattern {
    /// Those that begin with this text.
    Prefix(&'static str),
    /// Those that end with it.
    Suffix(&'static str),
    /// Those that contain it.
    Part(&'static str),
}

impl Pattern {
    /// Returns the text of the entry.
    pub fn text(self) -> &'static str {
        let (Pattern::Prefix(text) | Pattern::Suffix(text) | Pattern::Part(text)) = self;
        text
    }

    /// Returns whether the entry stands for this name.
    pub fn matches(self, name: &str) -> bool {
        match self {
            Pattern::Prefix(text) => name.starts_with(text),
            Pattern::Suffix(text) => name.ends_with(text),
            Pattern::Part(text) => name.contains(text),
        }
    }
}

impl Reviewed {
    /// Returns the entries for which `is_there` is false.
    pub fn unmatched(&self, is_there: impl Fn(Pattern) -> bool) -> Vec<&'static str> {
        let pairs = self.never.iter().chain(self.circles);
        let pointers =
            self.pointers.iter().flat_map(|(caller, callees)| [caller].into_iter().chain(*callees));
        let parts = self.programs.iter().chain(self.first).chain(pointers);
        let parts = parts.copied().chain(pairs.flat_map(|(caller, callee)| [*caller, *callee]));
        let prefixes = self.endings.iter().map(|text| Pattern::Prefix(text));
        let suffixes = self.lookups.iter().map(|text| Pattern::Suffix(text));
        let all = prefixes.chain(suffixes).chain(parts.map(Pattern::Part));
        all.filter(|pattern| !is_there(*pattern)).map(Pattern::text).collect()
    }
}

/// The call graph of a library.
pub struct Graph<'l> {
    library: &'l Library,
    reviewed: &'l Reviewed,
    frames: BTreeMap<u64, Frame>,
    /// For each function, its stack usage and the callee with the largest share of it.
    once: BTreeMap<u64, (i64, Option<u64>)>,
    twice: BTreeMap<u64, (i64, Option<u64>)>,
    /// Questions that the analysis could not answer.
    pub puzzles: BTreeSet<String>,
}

impl<'l> Graph<'l> {
    /// Creates a graph in which no function has been analysed.
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

    /// Returns the maximum stack usage of a call of `function`, including its return address.
    pub fn needs(&mut self, function: u64) -> i64 {
        self.measure(function, &mut Vec::new(), false);
        self.measure(function, &mut Vec::new(), true) + 8
    }

    /// Returns the path of that maximum: each function, with the usage from there on.
    pub fn path(&self, function: u64) -> Vec<String> {
        let mut path = Vec::new();
        let mut seen = BTreeSet::new();
        let mut at = Some(function);
        while let Some(function) = at {
            let (need, next) = self.twice.get(&function).copied().unwrap_or_default();
            // The second run through a cycle has less left.
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

    /// Returns the functions of shunt at this offset of any vtable.
    fn methods(&self, offset: i64) -> BTreeSet<u64> {
        let is_table = |start: u64| {
            // A vtable has a destructor or null, then size and alignment, which are not addresses.
            [8, 16].iter().all(|number| !self.library.linked.contains_key(&(start + number)))
        };
        let within = |(place, _): &(u64, u64)| is_table(place.wrapping_sub(offset as u64));
        let ours = |address: &u64| {
            let name = self.library.name(*address);
            // The table of functions for a program without libc looks like a vtable, but is none.
            name.contains("shunt") && !name.starts_with("shunt::intercept::")
                || name.starts_with("core::ops::function::FnOnce::call_once")
        };
        self.library.pointed_to().filter(within).map(|(_, function)| function).filter(ours).collect()
    }

    fn named(&self, parts: &[&str]) -> BTreeSet<u64> {
        let is = |name: &str| parts.iter().any(|part| name.contains(part));
        self.library.functions.iter().filter(|(_, one)| is(&one.name)).map(|(address, _)| *address).collect()
    }

    /// Returns the functions of the library that a call may reach.
    fn resolve(&mut self, caller: u64, at: u64, callees: &BTreeSet<Value>) -> BTreeSet<u64> {
        let name = self.library.name(caller);
        let mut reached = BTreeSet::new();
        for callee in callees {
            match callee {
                Value::Local(address) => {
                    reached.insert(*address);
                }
                // Functions of other libraries use stack as they do without shunt.
                Value::Import(_) | Value::Variable(_) | Value::Target(_) => {}
                Value::Field(offset) if *offset >= METHODS && name.contains("shunt") => {
                    reached.extend(self.methods(*offset));
                }
                Value::Result(of) if self.reviewed.lookups.iter().any(|one| of.ends_with(one)) => {}
                // A hook that jumps to the function that it was given; see `hooks::trampoline`.
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
