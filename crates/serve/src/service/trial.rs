//! Runs the BPF half of a service on given bytes, without a socket (BPF_PROG_RUN).
//! `include/shunt/test.bpf.h` has the programs.

use std::sync::Arc;

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::hash::Scheme;

use super::contents::Stored;
use super::native::{RawVerdict, parsed};
use super::store::{Session, Store};
use super::verifier::{Complaint, LoadError};
use super::{Answer, Parse, Refusal, Verdict};

/// The programs of test.bpf.h, one for each function of a service.
pub const PROGRAMS: [&str; 11] = [
    "shunt_test_parse",
    "shunt_test_parse_reply",
    "shunt_test_decide",
    "shunt_test_refuse",
    "shunt_test_timer",
    "shunt_test_service_timer",
    "shunt_test_accepted",
    "shunt_test_closed",
    "shunt_test_started",
    "shunt_test_replied",
    "shunt_test_hash",
];

/// Bytes in front of the message: an Ethernet header, which BPF_PROG_RUN needs, and 7 more, which
/// show that a service does not assume its message at a fixed offset.
const BEGIN: usize = 14 + 7;

/// The most bytes of a trial. The kernel allows a page, including its own overhead.
pub const MAX_BYTES: usize = 3072;

/// A service that is loaded into the kernel, but attached to nothing.
#[derive(Debug)]
pub struct Trial {
    loaded: Ebpf,
    /// The context of the next call of a timer.
    context: u64,
    /// The state, if the service has one.
    store: Option<Arc<Store>>,
}

/// An error that prevents a run.
#[derive(Debug, Error)]
pub enum RunError {
    /// The kernel rejected the run.
    #[error("the kernel did not run the program: {0}")]
    Kernel(String),
    /// The input is longer than the kernel allows.
    #[error("a trial is of {MAX_BYTES} bytes at most")]
    TooLong,
}

impl Trial {
    /// Loads the functions of a service, which the kernel verifies. They have no state.
    pub fn load(object: &[u8]) -> Result<Trial, LoadError> {
        super::verifier::check_loadable(object)?;
        let mut loaded = Ebpf::load(object).map_err(|error| LoadError::of(&error))?;
        for name in PROGRAMS {
            let program = loaded.program_mut(name).ok_or(LoadError::NotAService)?;
            let program: &mut SchedClassifier = program.try_into().map_err(|_| LoadError::NotAService)?;
            program.load().map_err(|error| match error {
                ProgramError::LoadError { ref verifier_log, .. } => {
                    match Complaint::read(name, &verifier_log.to_string()) {
                        Some(complaint) => LoadError::Unsafe(complaint),
                        None => LoadError::of(&error),
                    }
                }
                other => LoadError::of(&other),
            })?;
        }
        Ok(Trial { loaded, context: 0, store: None })
    }

    /// Gives the service the memory for its state.
    pub fn with_store(mut self, store: &Arc<Store>) -> Result<Trial, LoadError> {
        store.lend(self.loaded.map_mut("shunt_memories").ok_or(LoadError::NotAService)?)?;
        self.store = Some(store.clone());
        Ok(self)
    }

    /// Runs the kernel's version of [`super::Service::parse`].
    pub fn parse(&mut self, bytes: &[u8]) -> Result<Parse, RunError> {
        Ok(parsed(self.run("shunt_test_parse", &mut Session::default(), bytes, 0)?.0))
    }

    /// Runs the kernel's version of [`super::Service::parse_reply`].
    pub fn parse_reply(&mut self, bytes: &[u8]) -> Result<Parse, RunError> {
        Ok(parsed(self.run("shunt_test_parse_reply", &mut Session::default(), bytes, 0)?.0))
    }

    /// Runs the kernel's version of [`super::Service::decide`].
    pub fn decide(&mut self, message: &[u8]) -> Result<Verdict, RunError> {
        self.decide_in(&mut Session::default(), message)
    }

    /// Runs the kernel's version of [`super::Service::decide_in`].
    pub fn decide_in(&mut self, session: &mut Session, message: &[u8]) -> Result<Verdict, RunError> {
        let verdict = self.run("shunt_test_decide", session, message, 0)?.1.verdict(message.len());
        let copy = |stored: Stored| match &self.store {
            Some(store) => stored.take(store),
            None => Vec::new(),
        };
        Ok(verdict.copied(&copy))
    }

    /// Runs the kernel's version of [`super::Service::refuse`].
    pub fn refuse(&mut self, head: &[u8], why: Refusal) -> Result<Answer, RunError> {
        self.refuse_in(&mut Session::default(), head, why)
    }

    /// Runs the kernel's version of [`super::Service::refuse_in`].
    pub fn refuse_in(
        &mut self,
        session: &mut Session,
        head: &[u8],
        why: Refusal,
    ) -> Result<Answer, RunError> {
        Ok(self.run("shunt_test_refuse", session, head, why as u32)?.1.answer())
    }

    /// Runs the kernel's version of a callback without a message: `timer`, `service_timer`,
    /// `accepted`, `closed` or `started`. Only timers use the context.
    pub fn event(&mut self, function: &str, session: &mut Session, context: u64) -> Result<Answer, RunError> {
        self.context = context;
        Ok(self.run(&format!("shunt_test_{function}"), session, &[], 0)?.1.answer())
    }

    /// Runs the kernel's version of [`super::Service::replied_in`].
    pub fn replied_in(
        &mut self,
        session: &mut Session,
        message: &[u8],
        reply: &[u8],
    ) -> Result<Answer, RunError> {
        let bytes = [message, reply].concat();
        Ok(self.run("shunt_test_replied", session, &bytes, message.len() as u32)?.1.answer())
    }

    /// Runs the kernel's version of [`crate::hash::one_at_a_time`] or [`crate::hash::ketama`].
    pub fn hash(&mut self, key: &[u8], scheme: Scheme) -> Result<u32, RunError> {
        Ok(self.run("shunt_test_hash", &mut Session::default(), key, (scheme == Scheme::Ketama).into())?.0
            as u32)
    }

    /// Runs a program and returns the contents of `struct shunt_test_result`.
    fn run(
        &mut self,
        program: &str,
        session: &mut Session,
        bytes: &[u8],
        why: u32,
    ) -> Result<(i32, RawVerdict), RunError> {
        let kernel = |error: &dyn std::fmt::Display| RunError::Kernel(error.to_string());
        if bytes.len() > MAX_BYTES {
            return Err(RunError::TooLong);
        }
        let map = self.loaded.map_mut("shunt_call").expect("in every service");
        let mut call: Array<&mut MapData, [u32; 4]> = map.try_into().map_err(|error| kernel(&error))?;
        let context = [self.context as u32, (self.context >> 32) as u32];
        call.set(0, [BEGIN as u32, why, context[0], context[1]], 0).map_err(|error| kernel(&error))?;
        let map = self.loaded.map_mut("shunt_result").expect("in every service");
        let mut result: Array<&mut MapData, [u8; RESULT]> = map.try_into().map_err(|error| kernel(&error))?;
        let mut before = [0; RESULT];
        before[SESSION..].copy_from_slice(session.as_bytes());
        result.set(0, before, 0).map_err(|error| kernel(&error))?;

        let mut packet = vec![0xa5; BEGIN];
        packet.extend_from_slice(bytes);
        let program = self.loaded.program(program).expect("loaded with the others");
        let program: &SchedClassifier = program.try_into().map_err(|error| kernel(&error))?;
        let options = TestRunOptions { data_in: Some(&packet), ..TestRunOptions::new() };
        let done = program.test_run(options).map_err(|error| kernel(&error))?;
        if done.return_value != 0 {
            return Err(RunError::Kernel(format!("it gave {}", done.return_value as i32)));
        }

        let map = self.loaded.map("shunt_result").expect("in every service");
        let result: Array<&MapData, [u8; RESULT]> = map.try_into().map_err(|error| kernel(&error))?;
        let result = result.get(&0, 0).map_err(|error| kernel(&error))?;
        let (parsed, rest) = i32::read_from_prefix(&result).expect("long enough");
        let (verdict, rest) = RawVerdict::read_from_prefix(&rest[4..]).expect("long enough");
        *session = Session::read_from_bytes(rest).expect("of this size");
        Ok((parsed, verdict))
    }
}

/// The offset of the session in `struct shunt_test_result`, and the size of that, in bytes.
const SESSION: usize = 8 + size_of::<RawVerdict>();
const RESULT: usize = SESSION + Session::BYTES;
