//! A histogram of the durations of single operations.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::worker::Measured;

/// A histogram in nanoseconds, with three significant digits.
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Latencies {
        Latencies(Histogram::new(3).expect("three digits are allowed"))
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.record(latency.as_nanos() as u64).expect("it grows by itself");
    }

    pub(crate) fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("it grows by itself");
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    pub(crate) fn measured(&self, operations: u64, seconds: f64) -> Measured {
        let percentile = |part| self.0.value_at_quantile(part) as f64 / 1000.0;
        Measured { operations, seconds, p50_us: percentile(0.5), p99_us: percentile(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_what_was_recorded() {
        let mut latencies = Latencies::new();
        for microseconds in 1..=100 {
            latencies.record(Duration::from_micros(microseconds * 10));
        }
        let measured = latencies.measured(100, 1.0);
        assert!((measured.p50_us - 500.0).abs() < 1.0, "{}", measured.p50_us);
        assert!((measured.p99_us - 990.0).abs() < 1.0, "{}", measured.p99_us);
    }
}
