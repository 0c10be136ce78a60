//! Extracts a figure from a load's output with a regular expression.

use regex::Regex;

/// The expression.
#[derive(Clone, Debug)]
pub(super) struct Metric(Regex);

/// An extracted figure.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reading {
    /// The value, in the unit without a prefix.
    pub(super) value: f64,
    pub(super) unit: String,
    /// The text before the number.
    pub(super) label: String,
}

/// Factors of the units of time, relative to a second, and below, of the prefixes of bytes and
/// bits.
const TIMES: [(&str, f64); 6] =
    [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("μs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
const PREFIXES: [(&str, f64); 10] = [
    ("Ki", 1_024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("k", 1e3),
    ("K", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("m", 1e-3),
    ("u", 1e-6),
];

impl Metric {
    pub(super) fn parse(text: &str) -> Result<Metric, String> {
        let expression = Regex::new(text).map_err(|error| error.to_string())?;
        if expression.captures_len() < 2 {
            return Err(r"put the number in brackets, as in requests/sec:\s+([\d.]+)".to_owned());
        }
        Ok(Metric(expression))
    }

    /// Returns the last match in the output. Earlier ones may be intermediate results.
    pub(super) fn read(&self, output: &str) -> Option<Reading> {
        let found = self.0.captures_iter(output).last()?;
        let number = found.get(1)?;
        let value: f64 = number.as_str().replace([',', '_'], "").parse().ok()?;
        let whole = found.get(0)?;
        let (factor, unit) = match found.get(2) {
            Some(unit) => base(unit.as_str()),
            // Not a factor: what the number counts is only named.
            None => (1.0, following(output.get(number.end()..)?)),
        };
        let before = output.get(whole.start()..number.start())?;
        let label = before.trim_matches(|c: char| c.is_whitespace() || ":=\"',|".contains(c)).to_owned();
        let label = if label.is_empty() { "the load's own figure".to_owned() } else { label };
        value.is_finite().then_some(Reading { value: value * factor, unit, label })
    }
}

/// Returns the words that follow a number on its line, such as "requests per second".
fn following(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let Some(words) = line.strip_prefix(' ') else { return String::new() };
    let is_word = |c: char| c.is_alphabetic() || c == '/' || c == ' ';
    let end = words.find(|c| !is_word(c)).unwrap_or(words.len());
    let words: Vec<&str> = words[..end].split_whitespace().collect();
    if words.len() > UNIT_WORDS { String::new() } else { words.join(" ") }
}

/// The most words of a unit. More are a sentence.
const UNIT_WORDS: usize = 3;

/// Splits a unit into a factor and the unit without a prefix. Unknown units are kept.
fn base(unit: &str) -> (f64, String) {
    if let Some((_, factor)) = TIMES.iter().find(|(name, _)| *name == unit) {
        return (*factor, "s".to_owned());
    }
    let is_known = |rest: &str| matches!(rest.as_bytes().first(), None | Some(b'B' | b'b' | b'/'));
    PREFIXES
        .iter()
        .find_map(|(prefix, factor)| {
            let rest = unit.strip_prefix(prefix).filter(|rest| is_known(rest))?;
            // A unit may be a letter that can be a prefix, such as m for minutes.
            let is_whole = matches!(*prefix, "m" | "u") && rest.is_empty();
            (!is_whole).then(|| (*factor, rest.to_owned()))
        })
        .unwrap_or((1.0, unit.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(expression: &str, output: &str) -> Option<(f64, String, String)> {
        let Reading { value, unit, label } = Metric::parse(expression).unwrap().read(output)?;
        Some((value, unit, label))
    }

    #[test]
    fn a_number_is_found_with_its_unit() {
        let figure = |value, unit: &str, label: &str| Some((value, unit.to_owned(), label.to_owned()));
        let wrk = "  Latency   1.50ms  2.00ms\nRequests/sec: 12,345.5\nTransfer/sec:     12.5MB\n";
        assert_eq!(read(r"Requests/sec:\s+([\d.,]+)", wrk), figure(12345.5, "", "Requests/sec"));
        assert_eq!(read(r"Transfer/sec:\s+([\d.]+)(\w+)", wrk), figure(12.5e6, "B", "Transfer/sec"));
        assert_eq!(read(r"Latency\s+([\d.]+)(\w+)", wrk), figure(0.0015, "s", "Latency"));
        assert_eq!(read(r"tps = ([\d.]+)", "tps = 5\ntps = 7"), figure(7.0, "", "tps"), "the last");
        assert_eq!(read(r"([\d.]+) ops", "9 ops"), figure(9.0, "ops", "the load's own figure"));
        let redis = "GET: 85251.48 requests per second, p50=0.28 msec";
        assert_eq!(read(r"GET: ([\d.]+)", redis), figure(85251.48, "requests per second", "GET"));
        assert_eq!(read(r"of ([\d.]+)", "of 5 that were all in time"), figure(5.0, "", "of"));
        assert_eq!(read(r"tps = ([\d.]+)", "no figure"), None);
    }

    #[test]
    fn prefixes_are_taken_off_what_is_known() {
        for (unit, expected) in [
            ("KiB", (1024.0, "B")),
            ("k", (1000.0, "")),
            ("Mb/s", (1e6, "b/s")),
            ("µs", (1e-6, "s")),
            ("m", (1.0, "m")),
            ("Gets/s", (1.0, "Gets/s")),
            ("requests/s", (1.0, "requests/s")),
        ] {
            let (factor, rest) = base(unit);
            assert_eq!((factor, rest.as_str()), expected, "{unit}");
        }
    }

    #[test]
    fn what_is_no_expression_is_refused() {
        assert!(Metric::parse("(").is_err());
        assert!(Metric::parse("requests").unwrap_err().contains("in brackets"));
    }
}
