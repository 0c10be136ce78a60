//! Limits a snapshot to some programs and connections.

use clap::Args;
use shunt_abi::status::{Connection, Process, Snapshot, Totals};

/// Which programs and connections are shown. Of each kind that is given, one must fit.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Filter {
    /// Show only programs with this name or process id
    #[arg(long, value_name = "NAME|PID")]
    pub(crate) program: Vec<String>,

    /// Show only connections with this port at either end, and programs that have one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Vec<u16>,
}

impl Filter {
    /// Returns whether everything is shown.
    pub(crate) fn is_empty(&self) -> bool {
        self.program.is_empty() && self.port.is_empty()
    }

    /// Removes the programs and connections that the filter excludes. The totals become those of the
    /// programs that remain.
    pub(crate) fn apply(&self, snapshot: &mut Snapshot) {
        if self.is_empty() {
            return;
        }
        snapshot.processes.retain(|process| self.takes_program(process));
        snapshot.ended_processes.retain(|process| self.takes_program(process) && self.port.is_empty());
        if !self.port.is_empty() {
            for process in &mut snapshot.processes {
                process.connections.retain(|connection| self.takes_ports_of(connection));
                process.ended_connections.retain(|connection| self.takes_ports_of(connection));
            }
            snapshot.processes.retain(|process| !process.connections.is_empty());
        }
        let mut totals = Totals::default();
        snapshot.processes.iter().for_each(|process| totals += &process.totals);
        snapshot.totals = totals;
    }

    fn takes_program(&self, process: &Process) -> bool {
        let is_it = |one: &String| *one == process.program || one.parse() == Ok(process.pid);
        self.program.is_empty() || self.program.iter().any(is_it)
    }

    fn takes_ports_of(&self, connection: &Connection) -> bool {
        [connection.local, connection.remote].iter().any(|end| self.port.contains(&end.port()))
    }

    /// Describes the filter, as in "program nginx and port 80".
    pub(crate) fn shown(&self) -> String {
        let any = |kind: &str, values: Vec<String>| {
            (!values.is_empty()).then(|| format!("{kind} {}", values.join(" or ")))
        };
        let ports = self.port.iter().map(u16::to_string).collect();
        let kinds = [any("program", self.program.clone()), any("port", ports)];
        kinds.into_iter().flatten().collect::<Vec<_>>().join(" and ")
    }
}

#[cfg(test)]
mod tests {
    use shunt_abi::reason::{Reason, Transport};
    use shunt_abi::status::{Direction, Share};

    use super::*;

    fn snapshot() -> Snapshot {
        let direction =
            Direction { transport: Transport::Shm, reason: Reason::None, tcp_bytes: 0, shm_bytes: 1 };
        let connection = |local: u16, remote: u16| Connection {
            cookie: 1,
            fd: 5,
            local: ([127, 0, 0, 1], local).into(),
            remote: ([127, 0, 0, 1], remote).into(),
            send: direction,
            receive: direction,
            option: None,
            connected: false,
            latency: Default::default(),
            ended_seconds_ago: None,
        };
        let process = |pid: u32, program: &str, connections| Process {
            pid,
            uid: 0,
            program: program.into(),
            totals: Totals { share: Share { seen: pid.into(), ..Share::default() }, ..Totals::default() },
            connections,
            left_out: 0,
            ended_connections: Vec::new(),
            ended_seconds_ago: None,
        };
        Snapshot {
            processes: vec![
                process(7, "nginx", vec![connection(80, 4000), connection(443, 4001)]),
                process(8, "curl", vec![connection(4000, 80)]),
                process(9, "7", vec![]),
            ],
            ..Snapshot::default()
        }
    }

    fn filtered(program: &[&str], port: &[u16]) -> (Vec<(u32, usize)>, u64) {
        let program = program.iter().map(|name| name.to_string()).collect();
        let mut snapshot = snapshot();
        Filter { program, port: port.to_vec() }.apply(&mut snapshot);
        let left = snapshot.processes.iter().map(|one| (one.pid, one.connections.len()));
        (left.collect(), snapshot.totals.share.seen)
    }

    #[test]
    fn programs_go_by_name_or_pid_and_connections_by_either_port() {
        assert_eq!(filtered(&["nginx"], &[]), (vec![(7, 2)], 7));
        assert_eq!(filtered(&["7"], &[]), (vec![(7, 2), (9, 0)], 16), "a number may be a name");
        assert_eq!(filtered(&[], &[80]), (vec![(7, 1), (8, 1)], 15));
        assert_eq!(filtered(&["curl", "nginx"], &[443, 4001]), (vec![(7, 1)], 7));
        assert_eq!(filtered(&["ngin"], &[]).0, []);
        assert_eq!(filtered(&[], &[]).0.len(), 3);
    }

    #[test]
    fn a_filter_can_be_read() {
        let filter = Filter { program: vec!["nginx".into(), "8".into()], port: vec![80] };
        assert_eq!(filter.shown(), "program nginx or 8 and port 80");
    }
}
