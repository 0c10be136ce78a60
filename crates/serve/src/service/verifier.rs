//! Translates the kernel verifier's log about a rejected service for the service's author.

use std::fmt;

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};
use thiserror::Error;

/// An error that prevents a service from running in the kernel.
#[derive(Debug, Error)]
pub enum LoadError {
    /// clang was missing when shunt was built.
    #[error("shunt was built without its kernel services: install clang and libbpf-dev, and build it again")]
    NotBuilt,
    /// The object is not a service.
    #[error("this is no service: it was not made by `shunt serve build`")]
    NotAService,
    /// The object's maps have the layout of another version.
    #[error("the service was built by another version of shunt: build it again")]
    OtherVersion,
    /// The process lacks the capabilities to load programs.
    #[error(
        "this process may not load programs into the kernel: it needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    )]
    NotPermitted,
    /// The verifier rejected the program.
    #[error("{0}")]
    Unsafe(Complaint),
    /// The kernel rejected the service for another reason.
    #[error("the kernel does not take the service: {0}")]
    Refused(String),
}

impl LoadError {
    /// Converts a loader's error. EPERM anywhere in its chain becomes `NotPermitted`; other errors
    /// keep their text.
    pub fn of(error: &(dyn std::error::Error + 'static)) -> LoadError {
        let mut text = String::new();
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(error) = cause {
            let denied = |error: &std::io::Error| error.raw_os_error() == Some(Errno::PERM.raw_os_error());
            if error.downcast_ref().is_some_and(denied) {
                return LoadError::NotPermitted;
            }
            text = if text.is_empty() { error.to_string() } else { format!("{text}: {error}") };
            cause = error.source();
        }
        LoadError::Refused(text.lines().next().unwrap_or_default().to_owned())
    }
}

/// Checks that an object can be loaded at all.
///
/// This must come first: without the capabilities, the BPF library caches wrong results of its
/// feature probes for the life of the process.
pub fn check_loadable(object: &[u8]) -> Result<(), LoadError> {
    if object.is_empty() {
        return Err(LoadError::NotBuilt);
    }
    let enough =
        [CapabilitySet::SYS_ADMIN, CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::NET_ADMIN];
    let held = capabilities(None).is_ok_and(|held| enough.iter().any(|set| held.effective.contains(*set)));
    if held { Ok(()) } else { Err(LoadError::NotPermitted) }
}

/// A verifier's complaint about a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// The function of the service: `parse`, `decide`, ...
    pub function: String,
    /// FILE:LINE, if the log has it.
    pub place: Option<String>,
    /// The source line.
    pub line: Option<String>,
    /// The verifier's message.
    pub said: String,
    /// The meaning of the message, and a remedy.
    pub advice: &'static str,
}

impl fmt::Display for Complaint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the kernel does not accept `{}`", self.function)?;
        if let Some(place) = &self.place {
            write!(formatter, "\n  at {place}")?;
        }
        if let Some(line) = &self.line {
            write!(formatter, "\n    {line}")?;
        }
        write!(formatter, "\n  {}\n  (the verifier: {})", self.advice, self.said)
    }
}

/// Phrases of the verifier, with advice for the author of a service. The first match counts.
const ADVICE: [(&[&str], &str); 9] = [
    (
        &["back-edge", "infinite loop"],
        "a loop whose end cannot be foreseen: count it up to a constant, or use shunt_loop, shunt_find or a framing",
    ),
    (
        &["too many jumps", "program is too large", "too large. Processed", "is too complex"],
        "too many ways through the code: loop with shunt_loop, and put what is repeated into a SHUNT_FUNCTION",
    ),
    (
        &["stack size", "stack depth", "looks like the BPF stack limit", "combined stack"],
        "more than 512 bytes of variables: make arrays smaller, or reuse them",
    ),
    (
        &["invalid read from stack", "invalid indirect read from stack", "uninitialized", "!read_ok"],
        "a variable is read that may not have been set: set it where it is declared, and look at what shunt_peek gives",
    ),
    (
        &[
            "invalid access to map value",
            "invalid access to memory",
            "unbounded memory access",
            "outside of the allowed",
        ],
        "an index or a length that was not compared with the size of the array before: compare it right before its use",
    ),
    (
        &[
            "variable-offset",
            "invalid variable-offset",
            "invalid write to stack",
            "invalid zero-sized",
            "unbounded variable",
        ],
        "an index or a length into a variable of the service that was not compared with its size right before",
    ),
    (
        &["mem_or_null", "map_value_or_null", "possibly NULL", "or_null"],
        "a pointer is used that may be null: compare it with NULL first",
    ),
    (
        &["invalid mem access 'scalar'", "invalid mem access 'inv'", "dereference of modified"],
        "a pointer is used that is not one of the service's own variables: bytes of a socket are read by shunt_peek only",
    ),
    (
        &["unknown func", "helper call is not allowed", "program of this type cannot use"],
        "a function of the kernel that services may not call, or that this kernel lacks",
    ),
];

impl Complaint {
    /// Parses the log about a program of test.bpf.h. Returns `None` if the log has no message.
    pub fn read(program: &str, log: &str) -> Option<Complaint> {
        let is_prose = |line: &&str| {
            let line = line.trim();
            !(line.is_empty()
                || line.starts_with("processed ")
                || line.starts_with("verification time")
                || line.starts_with("stack depth ")
                || line.starts_with(';')
                || is_instruction(line))
        };
        let lines: Vec<&str> = log.lines().collect();
        // States of the registers may follow the message.
        let has_advice = |line: &&str| ADVICE.iter().any(|(words, _)| fits(line, words));
        let known = lines.iter().rposition(|line| is_prose(line) && has_advice(line));
        let at = known.or_else(|| lines.iter().rposition(is_prose))?;
        let said = lines[at].trim().to_owned();
        let source = lines[..at].iter().rev().find(|line| line.starts_with("; "));
        // "; a += b; @ file.c:12" since Linux 6.10, and without the position before.
        let (line, place) = match source.map(|line| line.trim_start_matches("; ")) {
            Some(text) => match text.rsplit_once(" @ ") {
                Some((line, place)) => (Some(line.trim().to_owned()), Some(place.trim().to_owned())),
                None => (Some(text.trim().to_owned()), None),
            },
            None => (None, None),
        };
        let advice = ADVICE
            .iter()
            .find(|(words, _)| fits(&said, words))
            .map_or("the verifier cannot tell that this is safe", |(_, advice)| advice);
        let function = program.trim_start_matches("shunt_test_").to_owned();
        Some(Complaint { function, place, line, said, advice })
    }
}

/// Returns whether a message contains one of the phrases.
fn fits(said: &str, words: &[&str]) -> bool {
    words.iter().any(|word| said.contains(word))
}

/// "12: (07) r1 += 8", "from 3 to 9: ...", "last_idx 3 ...".
fn is_instruction(line: &str) -> bool {
    let numbered = line.split_once(':').is_some_and(|(number, _)| number.parse::<u32>().is_ok());
    numbered
        || ["from ", "mark_precise", "last_idx", "func#", "R0", "R1", "parent ", "cur state", "old state"]
            .iter()
            .any(|start| {
                line.starts_with(start)
                    && !line.contains("invalid")
                    && !line.contains("!read_ok")
                    && !line.contains("unbounded")
            })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_has_its_line_and_its_meaning() {
        let log = "func#0 @0\n0: R1=ctx() R10=fp0\n; int sum = 0; @ mine.c:9\n0: (b7) r1 = 0\n; sum += bytes[at]; @ mine.c:12\n\
            8: (71) r2 = *(u8 *)(r3 +0)\ninvalid access to map value, value_size=8 off=9 size=1\n\
            R3 min value is outside of the allowed memory range\nprocessed 9 insns (limit 1000000)\n";
        let complaint = Complaint::read("shunt_test_parse", log).expect("there is a log");
        assert_eq!(complaint.function, "parse");
        assert_eq!(complaint.place.as_deref(), Some("mine.c:12"));
        assert_eq!(complaint.line.as_deref(), Some("sum += bytes[at];"));
        assert_eq!(complaint.said, "R3 min value is outside of the allowed memory range");
        assert!(complaint.advice.contains("compare it right before"), "{}", complaint.advice);
    }

    #[test]
    fn an_endless_loop_is_named_before_the_states_of_the_registers() {
        let log = "func#0 @0\n; while (at != 7) @ mine.c:21\n5: (55) if r1 != 0x7 goto pc-1\n\
            ; something else @ mine.c:30\n6: (95) exit\n; while (at != 7) @ mine.c:21\n\
            infinite loop detected at insn 5\ncur state: R1=scalar() R10=fp0\nold state: R1=scalar() R10=fp0\n\
            processed 9 insns (limit 1000000)\n";
        let complaint = Complaint::read("shunt_test_decide", log).expect("there is a log");
        assert_eq!(complaint.place.as_deref(), Some("mine.c:21"));
        assert_eq!(complaint.said, "infinite loop detected at insn 5");
        assert!(complaint.advice.starts_with("a loop"), "{}", complaint.advice);
    }

    #[test]
    fn without_a_log_there_is_nothing_to_say() {
        assert_eq!(Complaint::read("shunt_test_parse", ""), None);
    }
}
