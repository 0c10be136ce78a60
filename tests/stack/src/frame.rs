//! Analyses one function: the depth of the stack at each of its calls, and the functions that each
//! call may reach.
//!
//! It follows every path through the code. It tracks the stack depth, and which function each
//! register and each spilled word may hold. Code that no jump leads to is for unwinding, which in
//! the shim happens only when a thread is cancelled. It is not analysed.

use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::library::{Library, Linked};

/// A possible value of a word, as far as it decides which function is called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    /// The address of a function of this library.
    Local(u64),
    /// A function of another library.
    Import(String),
    /// The content of a variable of this library: a function that was looked up in other libraries.
    Variable(u64),
    /// The result of the function with this name.
    Result(String),
    /// The address of a variable of this library.
    Address(u64),
    /// The content at this offset of an unknown object, like a method in a vtable.
    Field(i64),
    /// A target of the jump table that begins here.
    Target(u64),
    /// Any other value.
    Unknown,
}

/// A call, or a jump to another function.
#[derive(Clone, Debug)]
pub struct Call {
    /// The bytes of stack that the caller uses when the callee's first instruction runs.
    pub depth: i64,
    /// The address of the call.
    pub at: u64,
    /// The functions that it may reach.
    pub callees: BTreeSet<Value>,
}

/// The stack usage of a function.
#[derive(Default)]
pub struct Frame {
    /// The most bytes that the function itself uses, without its return address.
    pub deepest: i64,
    /// The calls that it makes.
    pub calls: Vec<Call>,
    /// Functions whose addresses it takes.
    pub takes: BTreeSet<u64>,
    /// Code that could not be analysed. If there is any, the result is not a bound.
    pub puzzles: Vec<String>,
}

#[derive(Clone, Default, PartialEq)]
struct State {
    depth: i64,
    /// The depth at which rbp points, if it holds a frame pointer.
    base: Option<i64>,
    /// A loop of stack probes: the register that holds its end, and the depth of that end.
    probe: Option<(Register, i64)>,
    registers: BTreeMap<Register, BTreeSet<Value>>,
    /// Spilled words, by depth.
    spilled: BTreeMap<i64, BTreeSet<Value>>,
}

/// A larger depth means that the analysis has misunderstood the code.
const ABSURD: i64 = 1 << 20;

/// Analyses the function that begins at `start`.
pub fn of(library: &Library, start: u64) -> Frame {
    let end = library.functions[&start].end;
    let mut walk =
        Walk { library, start, end, code: BTreeMap::new(), known: BTreeMap::new(), frame: Frame::default() };
    let decoder = Decoder::with_ip(64, library.code(start, end), start, DecoderOptions::NONE);
    walk.code = decoder.into_iter().map(|one| (one.ip(), one)).collect();
    walk.follow(start, State::default());
    walk.finish()
}

struct Walk<'l> {
    library: &'l Library,
    start: u64,
    end: u64,
    code: BTreeMap<u64, Instruction>,
    known: BTreeMap<u64, State>,
    frame: Frame,
}

impl Walk<'_> {
    fn follow(&mut self, from: u64, state: State) {
        let mut work = vec![(from, state)];
        while let Some((at, state)) = work.pop() {
            let Some(one) = self.code.get(&at).copied() else { continue };
            let state = match self.known.get(&at) {
                None => state,
                Some(before) => {
                    let merged = before.merge(&state);
                    if merged == *before {
                        continue;
                    }
                    merged
                }
            };
            if state.depth > ABSURD {
                self.frame.puzzles.push(format!(
                    "{:#x}: the stack grows without end in {}",
                    at,
                    self.library.name(self.start)
                ));
                return;
            }
            self.known.insert(at, state.clone());
            let mut after = state;
            if !self.step(&one, &mut after) {
                self.frame.puzzles.push(format!(
                    "{:#x}: how much stack is there? in {}",
                    at,
                    self.library.name(self.start)
                ));
                return;
            }
            match one.flow_control() {
                FlowControl::Return | FlowControl::Exception => {}
                FlowControl::IndirectBranch => {
                    if after.depth > 0
                        && !self.callees(&one, &after).iter().all(|one| matches!(one, Value::Target(_)))
                    {
                        let name = self.library.name(self.start);
                        self.frame.puzzles.push(format!("{at:#x}: where does this jump lead, in {name}"));
                    }
                    for value in self.callees(&one, &after) {
                        let Value::Target(table) = value else { continue };
                        work.extend(self.targets(table).into_iter().map(|target| (target, after.clone())));
                    }
                }
                FlowControl::UnconditionalBranch => work.push((one.near_branch_target(), after)),
                FlowControl::ConditionalBranch => {
                    // A loop of probes ends at its final depth; the depths in between are smaller.
                    match after.probe.take() {
                        Some((_, depth)) if one.near_branch_target() < at && after.depth < depth => {
                            after.depth = depth
                        }
                        probe => {
                            after.probe = probe;
                            work.push((one.near_branch_target(), after.clone()));
                        }
                    }
                    work.push((one.next_ip(), after));
                }
                _ => work.push((one.next_ip(), after)),
            }
        }
    }

    /// Applies one instruction to the state. Returns `false` if its effect on the stack is unknown.
    fn step(&mut self, one: &Instruction, state: &mut State) -> bool {
        let value = self.loaded(one, state);
        let target = one.op0_register().full_register();
        let to_register = one.op_count() > 0 && one.op0_kind() == OpKind::Register;
        if one.mnemonic() == Mnemonic::Mov
            && one.op0_kind() == OpKind::Memory
            && one.memory_index() == Register::None
        {
            let place = match one.memory_base() {
                Register::RSP => Some(state.depth),
                Register::RBP => state.base,
                _ => None,
            };
            if let Some(place) = place {
                state.spilled.insert(place - one.memory_displacement64() as i64, value.clone());
            }
        }
        if one.mnemonic() == Mnemonic::Call {
            for caller_saved in CALLER_SAVED {
                state.registers.remove(&caller_saved);
            }
            let result = self.callees(one, state).into_iter().map(|callee| match callee {
                Value::Local(address) => Value::Result(self.library.name(address).to_owned()),
                Value::Import(name) => Value::Result(name),
                _ => Value::Unknown,
            });
            state.registers.insert(Register::RAX, result.collect());
            return true;
        }
        if one.mnemonic() == Mnemonic::Syscall {
            for changed in [Register::RAX, Register::RCX, Register::R11] {
                state.registers.remove(&changed);
            }
            return true;
        }
        if to_register
            && target == Register::RBP
            && one.mnemonic() == Mnemonic::Mov
            && one.op1_register() == Register::RSP
        {
            state.base = Some(state.depth);
        }
        if to_register && target == Register::RSP {
            return self.move_stack(one, state);
        }
        if to_register
            && one.mnemonic() == Mnemonic::Lea
            && one.memory_base() == Register::RSP
            && target == Register::R11
        {
            state.probe = Some((target, state.depth - one.memory_displacement64() as i64));
        }
        // The end of the probe loop can also be computed in two steps.
        if to_register
            && one.mnemonic() == Mnemonic::Mov
            && one.op1_register() == Register::RSP
            && target == Register::R11
        {
            state.probe = Some((target, state.depth));
        }
        if to_register
            && one.mnemonic() == Mnemonic::Sub
            && target == Register::R11
            && one.op1_kind() != OpKind::Register
        {
            state.probe = state.probe.map(|(register, depth)| (register, depth + one.immediate(1) as i64));
        }
        if one.mnemonic() == Mnemonic::Leave {
            let Some(base) = state.base else { return false };
            state.depth = base - 8;
            return true;
        }
        state.depth -= i64::from(one.stack_pointer_increment());
        if to_register
            && !matches!(one.mnemonic(), Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Push | Mnemonic::Jmp)
        {
            state.registers.insert(target, value);
        }
        true
    }

    fn move_stack(&mut self, one: &Instruction, state: &mut State) -> bool {
        match one.mnemonic() {
            Mnemonic::Sub | Mnemonic::Add if one.op1_kind() != OpKind::Register => {
                let amount = one.immediate(1) as i64;
                state.depth += if one.mnemonic() == Mnemonic::Sub { amount } else { -amount };
            }
            // Alignment takes less than the alignment's size.
            Mnemonic::And => state.depth += -(one.immediate(1) as i64) - 1,
            Mnemonic::Lea if one.memory_base() == Register::RBP => {
                let Some(base) = state.base else { return false };
                state.depth = base - one.memory_displacement64() as i64;
            }
            Mnemonic::Lea if one.memory_base() == Register::RSP => {
                state.depth -= one.memory_displacement64() as i64;
            }
            Mnemonic::Mov if one.op1_register() == Register::RBP => {
                let Some(base) = state.base else { return false };
                state.depth = base;
            }
            Mnemonic::Cmp | Mnemonic::Test => {}
            _ => return false,
        }
        true
    }

    /// Returns the possible values that an instruction puts into its target.
    fn loaded(&mut self, one: &Instruction, state: &State) -> BTreeSet<Value> {
        let unknown = BTreeSet::from([Value::Unknown]);
        let of = |register: Register| {
            state.registers.get(&register.full_register()).cloned().unwrap_or(unknown.clone())
        };
        match one.mnemonic() {
            Mnemonic::Lea if one.is_ip_rel_memory_operand() => {
                let address = one.ip_rel_memory_address();
                if !self.library.functions.contains_key(&address) {
                    return BTreeSet::from([Value::Address(address)]);
                }
                self.frame.takes.insert(address);
                BTreeSet::from([Value::Local(address)])
            }
            Mnemonic::Mov | Mnemonic::Cmove | Mnemonic::Cmovne => {
                let mut values = match (one.op0_kind(), one.op1_kind()) {
                    (_, OpKind::Register) => of(one.op1_register()),
                    (_, OpKind::Memory) => self.word(one, state),
                    _ => unknown.clone(),
                };
                if one.mnemonic() != Mnemonic::Mov {
                    values.extend(of(one.op0_register()));
                }
                values
            }
            Mnemonic::Movsxd if one.op1_kind() == OpKind::Memory => {
                let target = |base| match base {
                    Value::Address(table) => Value::Target(table),
                    _ => Value::Unknown,
                };
                of(one.memory_base()).into_iter().map(target).collect()
            }
            Mnemonic::Add if one.op1_kind() == OpKind::Register => {
                let is_target = |value: &Value| matches!(value, Value::Target(_));
                let targets: BTreeSet<_> = (&of(one.op0_register()) | &of(one.op1_register()))
                    .into_iter()
                    .filter(is_target)
                    .collect();
                if targets.is_empty() { unknown } else { targets }
            }
            _ => unknown,
        }
    }

    /// Returns the possible values of the memory word that an instruction reads.
    fn word(&self, one: &Instruction, state: &State) -> BTreeSet<Value> {
        let in_memory = |place: u64| match self.library.linked.get(&place) {
            Some(Linked::Local(address)) => Value::Local(*address),
            Some(Linked::Import(name)) => Value::Import(name.clone()),
            None => Value::Variable(place),
        };
        if one.is_ip_rel_memory_operand() {
            return BTreeSet::from([in_memory(one.ip_rel_memory_address())]);
        }
        let unknown = BTreeSet::from([Value::Unknown]);
        if one.memory_index() != Register::None {
            return unknown;
        }
        let offset = one.memory_displacement64() as i64;
        let place = match one.memory_base() {
            Register::RSP => Some(state.depth - offset),
            Register::RBP => state.base.map(|base| base - offset),
            _ => None,
        };
        if let Some(place) = place {
            return state.spilled.get(&place).cloned().unwrap_or(unknown);
        }
        let bases = state.registers.get(&one.memory_base()).cloned().unwrap_or(unknown);
        let field = |base| match base {
            Value::Address(address) | Value::Local(address) => in_memory(address.wrapping_add_signed(offset)),
            _ => Value::Field(offset),
        };
        bases.into_iter().map(field).collect()
    }

    /// Returns the targets of a jump table. The table ends at the first entry that leads outside
    /// this function.
    fn targets(&self, table: u64) -> Vec<u64> {
        let places = (table..).step_by(4).map_while(|place| self.library.number(place));
        let targets = places.map(|offset| table.wrapping_add_signed(offset.into()));
        targets.take_while(|target| self.code.contains_key(target)).collect()
    }

    fn callees(&self, one: &Instruction, state: &State) -> BTreeSet<Value> {
        match one.op0_kind() {
            OpKind::NearBranch64 => BTreeSet::from([self.landing(one.near_branch_target())]),
            OpKind::Register => {
                state.registers.get(&one.op0_register()).cloned().unwrap_or(BTreeSet::from([Value::Unknown]))
            }
            _ => self.word(one, state),
        }
    }

    /// Returns the target of a direct call: a function of this library, or, through the linker's
    /// stub, of another.
    fn landing(&self, target: u64) -> Value {
        if self.library.functions.contains_key(&target) {
            return Value::Local(target);
        }
        let mut stub =
            Decoder::with_ip(64, self.library.code(target, target + 16), target, DecoderOptions::NONE);
        let mut jump = stub.decode();
        if jump.code() == Code::Endbr64 {
            jump = stub.decode();
        }
        if jump.is_ip_rel_memory_operand() {
            match self.library.linked.get(&jump.ip_rel_memory_address()) {
                Some(Linked::Local(address)) => return Value::Local(*address),
                Some(Linked::Import(name)) => return Value::Import(name.clone()),
                None => {}
            }
        }
        Value::Unknown
    }

    fn finish(mut self) -> Frame {
        for (at, state) in &self.known {
            let one = &self.code[at];
            self.frame.deepest = self.frame.deepest.max(state.depth);
            let is_call = one.mnemonic() == Mnemonic::Call;
            let leaves = match one.flow_control() {
                FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
                    !(self.start..self.end).contains(&one.near_branch_target())
                        || one.near_branch_target() == self.start
                }
                FlowControl::IndirectBranch => {
                    !self.callees(one, state).iter().any(|one| matches!(one, Value::Target(_)))
                }
                _ => is_call,
            };
            if leaves {
                let depth = state.depth + if is_call { 8 } else { 0 };
                self.frame.calls.push(Call { depth, at: *at, callees: self.callees(one, state) });
            }
        }
        // Includes the return address of the last call.
        let calls = self.frame.calls.iter().map(|call| call.depth).max().unwrap_or(0);
        self.frame.deepest = self.frame.deepest.max(calls);
        self.frame
    }
}

const CALLER_SAVED: [Register; 9] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
];

impl State {
    /// Merges the states of two paths that meet.
    fn merge(&self, other: &State) -> State {
        let registers = union(&self.registers, &other.registers);
        let spilled = union(&self.spilled, &other.spilled);
        State {
            depth: self.depth.max(other.depth),
            base: self.base.max(other.base),
            probe: self.probe.or(other.probe),
            registers,
            spilled,
        }
    }
}

/// Merges two maps. A place that is missing in one of them may hold any value.
fn union<K: Ord + Copy>(
    one: &BTreeMap<K, BTreeSet<Value>>,
    other: &BTreeMap<K, BTreeSet<Value>>,
) -> BTreeMap<K, BTreeSet<Value>> {
    let mut both = BTreeMap::new();
    for place in one.keys().chain(other.keys()) {
        let values = |of: &BTreeMap<K, BTreeSet<Value>>| {
            of.get(place).cloned().unwrap_or(BTreeSet::from([Value::Unknown]))
        };
        both.insert(*place, &values(one) | &values(other));
    }
    both
}
