//! Finds the latencies that well-known loads print.

use std::sync::LazyLock;

use regex::Regex;

/// A line with a percentile, as of wrk (`50%  1.20ms`), ab (`50%  3`) and hey (`50% in 0.0012 secs`).
static PERCENTILE: LazyLock<Regex> = LazyLock::new(|| {
    let line = r"(?m)^\s*(50|99)(?:\.0+)?%\s+(?:in\s+)?([\d.]+)\s*(us|ms|secs?|s)?\s*$";
    Regex::new(line).expect("an expression")
});
/// The summary of redis-benchmark, and below, its short form.
static REDIS: LazyLock<Regex> = LazyLock::new(|| {
    let table = r"latency summary \(msec\):\s+avg\s+min\s+p50\s+p95\s+p99\s+max\s+[\d.]+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s+([\d.]+)";
    Regex::new(table).expect("an expression")
});
static REDIS_SHORT: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"p50=([\d.]+) msec").expect("an expression"));

/// Returns the median and the 99th percentile of the latency in seconds, each if it was printed.
pub(super) fn read(output: &str) -> [Option<f64>; 2] {
    let millis = |text: &str| text.parse::<f64>().ok().map(|value| value / 1e3);
    if let Some(found) = REDIS.captures_iter(output).last() {
        return [millis(&found[1]), millis(&found[2])];
    }
    if let Some(found) = REDIS_SHORT.captures_iter(output).last() {
        return [millis(&found[1]), None];
    }
    let mut latency = [None; 2];
    for found in PERCENTILE.captures_iter(output) {
        let factor = match found.get(3).map(|unit| unit.as_str()) {
            Some("us") => 1e-6,
            Some("s" | "sec" | "secs") => 1.0,
            // ab prints milliseconds without a unit.
            _ => 1e-3,
        };
        latency[usize::from(&found[1] == "99")] = found[2].parse::<f64>().ok().map(|value| value * factor);
    }
    latency
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_of_well_known_loads_are_found() {
        let wrk = "  Latency Distribution\n     50%  250.00us\n     75%    1.00ms\n     99%    2.50ms\n";
        assert_eq!(read(wrk), [Some(250e-6), Some(2.5e-3)]);
        let ab = "Percentage of the requests served within a certain time (ms)\n  50%      2\n  99%      7\n 100%      9 (longest request)\n";
        assert_eq!(read(ab), [Some(2e-3), Some(7e-3)]);
        let hey = "Latency distribution:\n  50% in 0.0012 secs\n  99% in 0.0100 secs\n";
        assert_eq!(read(hey), [Some(0.0012), Some(0.01)]);
        let redis = "  latency summary (msec):\n          avg       min       p50       p95       p99       max\n        0.281     0.080     0.287     0.415     0.503     1.151\n";
        assert_eq!(read(redis), [Some(0.287e-3), Some(0.503e-3)]);
        assert_eq!(read("GET: 85251.48 requests per second, p50=0.287 msec"), [Some(0.287e-3), None]);
        assert_eq!(read("50% of the work is done\n"), [None, None]);
    }
}
