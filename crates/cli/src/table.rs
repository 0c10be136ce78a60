//! Formats aligned columns, and numbers for people.
//!
//! A table that is wider than its screen loses whole columns, the least important first. A number
//! or an address is never cut: see [`fit`].

use ratatui::text::Span;

/// The spaces between two columns.
pub(crate) const GAP: usize = 2;

/// One column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    pub(crate) title: &'static str,
    pub(crate) right: bool,
    /// Its importance. A column with a higher rank is left out before one with a lower rank.
    pub(crate) rank: u8,
    /// The width that its texts may be shortened to. `None`: they are never shortened.
    pub(crate) least: Option<usize>,
}

/// Returns a column of texts, aligned left.
pub(crate) const fn left(title: &'static str, rank: u8) -> Column {
    Column { title, right: false, rank, least: None }
}

/// Returns a column of numbers, aligned right.
pub(crate) const fn right(title: &'static str, rank: u8) -> Column {
    Column { title, right: true, rank, least: None }
}

impl Column {
    /// Returns the column with texts that may be shortened to `least`.
    pub(crate) const fn shortened_to(self, least: usize) -> Column {
        Column { least: Some(least), ..self }
    }

    /// Returns the least width at which the column may be shown, for texts of `natural` width.
    fn floor(&self, natural: usize) -> usize {
        self.least.map_or(natural, |least| natural.min(least.max(width(self.title))))
    }
}

/// Returns the width of the widest text of each column, its title included.
pub(crate) fn natural_widths(columns: &[Column], rows: &[Vec<String>]) -> Vec<usize> {
    let natural = |(at, column): (usize, &Column)| {
        let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| width(cell));
        cells.chain([width(column.title)]).max().unwrap_or(0)
    };
    columns.iter().enumerate().map(natural).collect()
}

/// Returns the width of each column on a screen that is `available` wide. `None` stands for a
/// column that is left out.
///
/// First, texts are shortened where their column allows that. Then columns are left out until the
/// rest fits: the one with the highest rank first, and of equal ranks the right one. Shortened texts
/// get the space that remains, and after them columns that were left out and fit now.
pub(crate) fn fit(columns: &[Column], natural: &[usize], available: usize) -> Vec<Option<usize>> {
    let mut widths: Vec<Option<usize>> =
        columns.iter().zip(natural).map(|(column, natural)| Some(column.floor(*natural))).collect();
    while total(&widths) > available {
        let kept = (0..columns.len()).filter(|at| widths[*at].is_some());
        let Some(last) = kept.max_by_key(|at| columns[*at].rank) else { break };
        widths[last] = None;
    }
    let mut left = available - total(&widths);
    let mut by_rank: Vec<usize> = (0..columns.len()).collect();
    by_rank.sort_by_key(|at| columns[*at].rank);
    for at in &by_rank {
        if let Some(width) = &mut widths[*at] {
            let more = (natural[*at] - *width).min(left);
            *width += more;
            left -= more;
        }
    }
    for at in by_rank {
        if widths[at].is_none() && widths.iter().any(Option::is_some) && natural[at] + GAP <= left {
            widths[at] = Some(natural[at]);
            left -= natural[at] + GAP;
        }
    }
    widths
}

/// Returns a time for people, from microseconds on.
pub(crate) fn time(nanos: u64) -> String {
    match nanos as f64 / 1e3 {
        micros if micros < 999.5 => format!("{micros:.0} us"),
        micros if micros < 999_950.0 => format!("{:.1} ms", micros / 1e3),
        micros => format!("{:.1} s", micros / 1e6),
    }
}

fn total(widths: &[Option<usize>]) -> usize {
    let shown = widths.iter().flatten();
    shown.clone().sum::<usize>() + GAP * shown.count().saturating_sub(1)
}

/// Returns how many columns of the terminal a text takes.
pub(crate) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// Returns the text, shortened to `limit` columns. An ellipsis replaces its end.
pub(crate) fn shorten(text: &str, limit: usize) -> String {
    if width(text) <= limit {
        return text.to_owned();
    }
    let mut short = text.to_owned();
    while !short.is_empty() && width(&short) + 1 > limit {
        short.pop();
    }
    if limit > 0 { short + "…" } else { short }
}

/// Aligns `rows` under `columns`, with two spaces between columns and no trailing spaces.
pub(crate) fn render(columns: &[Column], rows: &[Vec<String>]) -> String {
    let natural = natural_widths(columns, rows);
    let titles = columns.iter().map(|column| column.title.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&titles).chain(rows) {
        let cells = row.iter().zip(columns).zip(&natural);
        let cells = cells.map(|((cell, column), width)| pad(cell, *width, column.right));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Fills a text up with spaces.
fn pad(text: &str, to: usize, right: bool) -> String {
    let spaces = " ".repeat(to.saturating_sub(width(text)));
    if right { spaces + text } else { text.to_owned() + &spaces }
}

/// Formats bytes in binary units, with about three digits.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Formats a duration by its two largest units.
pub(crate) fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let columns = [left("NAME", 0), right("N", 0)];
        let rows = [vec!["a".into(), "1000".into()], vec!["longer".into(), "2".into()]];
        assert_eq!(render(&columns, &rows), "NAME       N\na       1000\nlonger     2\n");
        assert_eq!(render(&columns, &[]), "NAME  N\n");
    }

    #[test]
    fn columns_go_by_rank_until_the_rest_fits() {
        let columns = [left("NAME", 0).shortened_to(6), right("A", 1), right("B", 3), right("C", 2)];
        let fitted = |available| fit(&columns, &[10, 4, 5, 6], available);
        assert_eq!(fitted(31), [Some(10), Some(4), Some(5), Some(6)]);
        assert_eq!(fitted(30), [Some(9), Some(4), Some(5), Some(6)], "the text is shortened first");
        assert_eq!(fitted(27), [Some(6), Some(4), Some(5), Some(6)]);
        assert_eq!(fitted(26), [Some(10), Some(4), None, Some(6)]);
        assert_eq!(fitted(19), [Some(10), Some(4), None, None]);
        assert_eq!(fitted(11), [Some(10), None, None, None]);
        assert_eq!(fitted(5), [None; 4]);
        let columns = [left("NAME", 0), left("WIDE", 1), right("N", 2)];
        assert_eq!(fit(&columns, &[4, 40, 3], 12), [Some(4), None, Some(3)], "the narrow one fits");
    }

    #[test]
    fn a_shortened_text_says_that_it_is() {
        for (limit, text) in [(9, "memcached"), (8, "memcach…"), (1, "…"), (0, "")] {
            assert_eq!(shorten("memcached", limit), text);
        }
        // These characters take two columns each.
        assert_eq!(shorten("漢字漢字", 6), "漢字…");
    }

    #[test]
    fn bytes_have_units() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10 * 1024, "10.0 KiB"),
            (1_048_575, "1.00 MiB"),
            (123 << 20, "123 MiB"),
            (5 << 30, "5.00 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn durations_have_two_units() {
        for (seconds, text) in [(0, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h")] {
            assert_eq!(duration(seconds), text);
        }
    }
}
