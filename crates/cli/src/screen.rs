//! The screen that standard output is on: its width, and whether it shows colours.
//!
//! A file or a pipe is no screen. Output to one is neither wrapped nor coloured, and tables have all
//! their columns.

use std::io::IsTerminal;

use ratatui::crossterm::terminal;
use shunt_abi::reason::Transport;

use crate::table::{self, Column};

/// The meaning of a text, which decides its colour. The text is clear without the colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    /// A title, or a name that is explained.
    Title,
    Good,
    Warning,
    Bad,
}

impl Tone {
    /// Returns the tone of a transport.
    pub(crate) fn of(transport: Transport) -> Tone {
        if transport == Transport::Shm { Tone::Good } else { Tone::Warning }
    }

    /// Returns the tone of a cell that may have the name of a transport.
    pub(crate) fn of_label(label: &str) -> Tone {
        let is = |transport: &&Transport| transport.label() == label;
        [Transport::Shm, Transport::Tcp].iter().find(is).map_or(Tone::Plain, |one| Tone::of(*one))
    }

    /// Returns the number of the terminal's attribute.
    fn code(self) -> Option<u8> {
        match self {
            Tone::Plain => None,
            Tone::Title => Some(1),
            Tone::Good => Some(32),
            Tone::Warning => Some(33),
            Tone::Bad => Some(31),
        }
    }
}

/// The screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Screen {
    /// Its columns. `None`: lines may have any length.
    pub(crate) width: Option<usize>,
    pub(crate) has_colours: bool,
}

impl Screen {
    /// Returns the screen of standard output. NO_COLOR turns colours off (<https://no-color.org>).
    pub(crate) fn of_output() -> Screen {
        if !std::io::stdout().is_terminal() {
            return Screen::default();
        }
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_none_or(|name| name == "dumb");
        let columns = terminal::size().ok().map(|(columns, _)| usize::from(columns));
        Screen { width: columns.filter(|columns| *columns > 0), has_colours: !is_set("NO_COLOR") && !is_dumb }
    }

    /// Returns the text in the colour of its tone.
    pub(crate) fn paint(&self, text: &str, tone: Tone) -> String {
        match tone.code().filter(|_| self.has_colours && !text.is_empty()) {
            Some(code) => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
            None => text.to_owned(),
        }
    }

    /// Returns the text in lines that fit, broken between words. All lines but the first, which
    /// `begun` columns precede, begin with `indent` spaces.
    pub(crate) fn wrap(&self, text: &str, begun: usize, indent: usize) -> String {
        let Some(available) = self.width else { return text.to_owned() };
        let (mut out, mut at) = (String::new(), begun);
        for word in text.split(' ') {
            let width = table::width(word);
            let gap = usize::from(!out.is_empty());
            if at + gap + width > available && !out.is_empty() && indent + width <= available.max(indent + 1)
            {
                out.push('\n');
                out.push_str(&" ".repeat(indent));
                at = indent;
            } else if gap > 0 {
                out.push(' ');
                at += 1;
            }
            out.push_str(word);
            at += width;
        }
        out
    }

    /// Aligns `rows` under `columns`, as far as they fit: see [`table::fit`]. `tone` returns the tone
    /// of a cell in a column. The last line names the columns that are left out.
    pub(crate) fn table(
        &self,
        columns: &[Column],
        rows: &[Vec<String>],
        tone: impl Fn(&Column, &str) -> Tone,
    ) -> String {
        let natural = table::natural_widths(columns, rows);
        let widths = match self.width {
            Some(available) => table::fit(columns, &natural, available),
            None => natural.iter().copied().map(Some).collect(),
        };
        let shown: Vec<(usize, usize)> =
            widths.iter().enumerate().filter_map(|(at, width)| Some((at, (*width)?))).collect();
        let mut text = String::new();
        let mut line = |cell: &dyn Fn(usize) -> (String, Tone)| {
            let mut line = String::new();
            let mut spaces = 0;
            for (at, width) in &shown {
                let (cell, tone) = cell(*at);
                let cell = table::shorten(&cell, *width);
                let fill = width - table::width(&cell);
                let right = columns[*at].right;
                // No line ends with spaces.
                if !cell.is_empty() {
                    line += &" ".repeat(spaces + if right { fill } else { 0 });
                    line += &self.paint(&cell, tone);
                    spaces = if right { 0 } else { fill };
                } else {
                    spaces += fill;
                }
                spaces += table::GAP;
            }
            text += &line;
            text.push('\n');
        };
        line(&|at| (columns[at].title.to_owned(), Tone::Title));
        for row in rows {
            line(&|at| (row[at].clone(), tone(&columns[at], &row[at])));
        }
        let left_out: Vec<&str> = columns
            .iter()
            .zip(&widths)
            .filter(|(_, width)| width.is_none())
            .map(|(column, _)| column.title)
            .collect();
        if !left_out.is_empty() {
            let note = format!("Columns that do not fit here: {}.", left_out.join(", "));
            text += &self.wrap(&note, 0, 0);
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::table::{left, right};

    const COLUMNS: [Column; 3] = [left("NAME", 0).shortened_to(6), left("KIND", 2), right("BYTES", 1)];

    fn table(width: Option<usize>, has_colours: bool) -> String {
        let rows = [
            ["memcached", "shm", "18446744073709551615"].map(str::to_owned).to_vec(),
            ["nc", "", "0"].map(str::to_owned).to_vec(),
        ];
        Screen { width, has_colours }.table(&COLUMNS, &rows, |_, cell| Tone::of_label(cell))
    }

    #[test]
    fn a_table_has_the_columns_that_fit() {
        let all = "NAME       KIND                 BYTES\n\
                   memcached  shm   18446744073709551615\n\
                   nc                                  0\n";
        assert_eq!(table(None, false), all);
        assert_eq!(table(Some(37), false), all);
        assert_eq!(
            table(Some(31), false),
            "NAME                      BYTES\n\
             memcached  18446744073709551615\n\
             nc                            0\n\
             Columns that do not fit here:\n\
             KIND.\n"
        );
    }

    #[test]
    fn colours_change_no_widths() {
        let coloured = table(None, true);
        assert!(coloured.contains("\u{1b}[32mshm\u{1b}[0m   1844"), "{coloured}");
        let plain = coloured.replace("\u{1b}[32m", "").replace("\u{1b}[1m", "").replace("\u{1b}[0m", "");
        assert_eq!(plain, table(None, false));
    }

    #[test]
    fn words_are_whole_and_lines_fit() {
        let screen = Screen { width: Some(12), has_colours: false };
        assert_eq!(screen.wrap("one two three four", 5, 2), "one two\n  three four");
        assert_eq!(screen.wrap("a-word-of-some-length is", 0, 2), "a-word-of-some-length\n  is");
        assert_eq!(Screen::default().wrap("one two", 80, 2), "one two");
    }

    proptest! {
        #[test]
        fn no_line_of_a_table_is_wider_than_the_screen(width in 1_usize..60) {
            for line in table(Some(width), false).lines().take(3) {
                prop_assert!(table::width(line) <= width, "{line:?}");
                let is_whole = |part: &str| part.is_empty() || part.contains('…')
                    || ["NAME", "KIND", "BYTES", "memcached", "nc", "shm", "18446744073709551615", "0"].contains(&part);
                prop_assert!(line.split(' ').all(is_whole), "{line:?}");
            }
        }
    }
}
