//! The access log: a thread writes what the others have formatted. They never wait for it: if the
//! queue is full, lines are lost and counted.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::{Format, Log};
use crate::message::{Request, Version};

/// Blocks of lines that wait for the log's thread.
const QUEUE: usize = 256;

/// Opens the log and starts its thread, which ends when the sender is dropped.
pub(crate) fn start(log: &Log) -> io::Result<SyncSender<Vec<u8>>> {
    let file = OpenOptions::new().append(true).create(true).open(&log.file)?;
    let (sender, receiver) = sync_channel(QUEUE);
    std::thread::Builder::new().name("serve-log".to_owned()).spawn(move || write(file, &receiver))?;
    Ok(sender)
}

fn write(mut file: File, blocks: &Receiver<Vec<u8>>) {
    let mut has_failed = false;
    while let Ok(block) = blocks.recv() {
        match file.write_all(&block) {
            Ok(()) => has_failed = false,
            Err(error) if !has_failed => {
                tracing::error!(%error, "the access log cannot be written");
                has_failed = true;
            }
            Err(_) => {}
        }
    }
}

/// What the log has of a request, once its head was read.
#[derive(Debug)]
pub(crate) struct Line {
    request: String,
    host: String,
    referer: String,
    agent: String,
}

/// The result of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) client: IpAddr,
    pub(crate) status: u16,
    /// Bytes of the reply's body.
    pub(crate) bytes: u64,
    pub(crate) micros: u64,
}

impl Line {
    pub(crate) fn of(request: &Request<'_, '_>) -> Line {
        let mut target = Vec::new();
        request.target.write(&mut target);
        let version = if request.version == Version::Http11 { "1.1" } else { "1.0" };
        let text = |name: &str| String::from_utf8_lossy(request.field(name).unwrap_or(b"-")).into_owned();
        Line {
            request: format!("{} {} HTTP/{version}", request.method, String::from_utf8_lossy(&target)),
            host: request.host.unwrap_or("-").to_owned(),
            referer: text("referer"),
            agent: text("user-agent"),
        }
    }

    /// Returns a line for a request that could not be parsed.
    pub(crate) fn unknown() -> Line {
        let nothing = || "-".to_owned();
        Line { request: nothing(), host: nothing(), referer: nothing(), agent: nothing() }
    }

    /// Appends the line.
    pub(crate) fn write(&self, format: Format, outcome: Outcome, time: SystemTime, out: &mut Vec<u8>) {
        let Outcome { client, status, bytes, micros } = outcome;
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
        if format == Format::Json {
            let line = serde_json::json!({
                "time": seconds, "client": client, "request": self.request, "host": self.host,
                "status": status, "bytes": bytes, "micros": micros, "referer": self.referer, "agent": self.agent,
            });
            out.extend_from_slice(line.to_string().as_bytes());
        } else {
            let line =
                format!("{client} - - [{}] \"{}\" {status} {bytes}", date(seconds), escaped(&self.request));
            out.extend_from_slice(line.as_bytes());
            if format == Format::Combined {
                out.extend_from_slice(
                    format!(" \"{}\" \"{}\"", escaped(&self.referer), escaped(&self.agent)).as_bytes(),
                );
            }
        }
        out.push(b'\n');
    }
}

/// Returns text in which no character ends the field or the line.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            char if char.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(char))),
            char => out.push(char),
        }
    }
    out
}

/// Returns a time as in `10/Oct/2000:13:55:36 +0000`.
fn date(seconds: u64) -> String {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    // Howard Hinnant's civil_from_days: years begin in March.
    let days = seconds / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = (month + 2) % 12;
    let year = era * 400 + year_of_era + u64::from(month < 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{day:02}/{}/{year}:{hour:02}:{minute:02}:{second:02} +0000", MONTHS[month as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "01/Jan/1970:00:00:00 +0000"),
            (951_782_399, "28/Feb/2000:23:59:59 +0000"),
            (951_782_400, "29/Feb/2000:00:00:00 +0000"),
            (971_186_136, "10/Oct/2000:13:55:36 +0000"),
            (4_107_542_400, "01/Mar/2100:00:00:00 +0000"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn lines_cannot_be_forged() {
        let line = Line {
            request: "GET /\" 200".to_owned(),
            host: "h".to_owned(),
            referer: "a\u{85}b".to_owned(),
            agent: "x\\".to_owned(),
        };
        let outcome = Outcome { client: IpAddr::from([127, 0, 0, 1]), status: 200, bytes: 5, micros: 7 };
        let mut out = Vec::new();
        line.write(Format::Combined, outcome, UNIX_EPOCH, &mut out);
        let text =
            "127.0.0.1 - - [01/Jan/1970:00:00:00 +0000] \"GET /\\\" 200\" 200 5 \"a\\x85b\" \"x\\\\\"\n";
        assert_eq!(String::from_utf8(out).unwrap(), text);
    }
}
