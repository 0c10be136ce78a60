//! The loads of the stacks, and the parsers of their output.

use std::time::Duration;

use serde::Deserialize;

use super::running::Texts;
use crate::nginx;
use crate::worker::Measured;

/// A load. All of them run for whole seconds.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Load {
    /// wrk, which fetches this path of a server.
    Wrk { server: String, path: String },
    /// This test of sysbench on MariaDB.
    Sysbench(String),
    /// A Python script that uses a library and prints its results as JSON. Its threads each send
    /// one request at a time.
    Script(String),
}

/// sysbench's common arguments: for the preparation of its data, and for all tests.
pub(super) const SYSBENCH: &str = "--db-driver=mysql --mysql-host=127.0.0.1 --mysql-user=root --mysql-port=@mariadb@ \
     --tables=1 --table-size=10000";
/// The file of a script.
pub(super) const SCRIPT: &str = "client.py";

impl Load {
    pub(super) fn program(&self) -> &'static str {
        match self {
            Load::Wrk { .. } => "wrk",
            Load::Sysbench(_) => "sysbench",
            Load::Script(_) => "python3",
        }
    }

    /// Returns its arguments for a turn.
    pub(super) fn arguments(&self, texts: &Texts, connections: u32, time: Duration) -> Vec<String> {
        let whole = time.as_secs_f64().ceil();
        match self {
            Load::Wrk { server, path } => {
                let url = texts.fill(&format!("http://127.0.0.1:@{server}@/{path}"));
                nginx::wrk(connections, time, &url).into()
            }
            Load::Sysbench(test) => words(&texts.fill(&format!(
                "{test} @sysbench@ --threads={connections} --time={whole} --events=0 --histogram=on run"
            ))),
            Load::Script(_) => words(&texts.fill(&format!("@dir@/{SCRIPT} {connections} {whole}"))),
        }
    }

    /// Parses its output. Returns `None` if an operation failed.
    pub(super) fn measured(&self, output: &str) -> Option<Measured> {
        match self {
            Load::Wrk { .. } => nginx::measured(output),
            Load::Sysbench(_) => sysbench(output),
            Load::Script(_) => output.lines().find_map(|line| serde_json::from_str(line).ok()),
        }
    }
}

/// Splits a line at spaces.
pub(super) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Parses sysbench's output. Its times are a histogram with lines of milliseconds, a bar and a
/// count.
fn sysbench(output: &str) -> Option<Measured> {
    let times: Vec<(f64, u64)> = output
        .lines()
        .filter_map(|line| {
            let (milliseconds, rest) = line.split_once('|')?;
            Some((milliseconds.trim().parse().ok()?, rest.split_whitespace().next_back()?.parse().ok()?))
        })
        .collect();
    let operations: u64 = times.iter().map(|(_, count)| count).sum();
    let seconds = output.lines().find_map(|line| line.trim().strip_prefix("total time:"))?;
    let seconds = seconds.trim().strip_suffix('s')?.parse().ok()?;
    let percentile = |part: f64| {
        let mut seen = 0;
        let mut slower = times.iter().skip_while(|(_, count)| {
            seen += count;
            (seen as f64) < part * operations as f64
        });
        Some(slower.next()?.0 * 1e3)
    };
    Some(Measured { operations, seconds, p50_us: percentile(0.5)?, p99_us: percentile(0.99)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_read() {
        let output = "Latency histogram (values are in milliseconds)\n       value  ------------- distribution ------------- count\n \
            \t0.100 |*************************  98\n       0.250 |***  1\n       9.000 |*** 1\n\n\
            General statistics:\n    total time:                          2.0000s\n";
        let measured = sysbench(output).unwrap();
        assert_eq!((measured.operations, measured.seconds), (100, 2.0));
        assert_eq!((measured.p50_us, measured.p99_us), (100.0, 250.0));
        assert!(sysbench("FATAL: it has failed").is_none());
    }
}
