//! The parts of Markdown that the documents use: code spans, links, headings and tables.

/// One line of a document outside fenced blocks, with its number from 1.
pub type Line<'a> = (usize, &'a str);

/// Returns the lines that are not in a fenced block.
pub fn prose(text: &str) -> Vec<Line<'_>> {
    let mut fenced = false;
    let outside = |line: &Line| {
        let is_fence = line.1.trim_start().starts_with("```");
        fenced ^= is_fence;
        !fenced && !is_fence
    };
    text.lines().enumerate().map(|(at, line)| (at + 1, line)).filter(outside).collect()
}

/// Returns the contents of the code spans of a line.
pub fn code_spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// Returns the targets of the links and images of a line.
pub fn links(line: &str) -> Vec<&str> {
    let targets = line.split("](").skip(1);
    targets.filter_map(|rest| rest.split([')', ' ']).next()).collect()
}

/// Returns the anchors that the headings of a document have, made as GitHub does.
pub fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text).into_iter().filter(|(_, line)| line.starts_with('#'));
    headings.map(|(_, line)| anchor(line.trim_start_matches('#').trim())).collect()
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|char| char.is_alphanumeric() || "-_ ".contains(*char));
    kept.flat_map(char::to_lowercase).map(|char| if char == ' ' { '-' } else { char }).collect()
}

/// One row of a table: the line's number, and its cells.
pub type Row<'a> = (usize, Vec<&'a str>);

/// Returns the rows of all tables whose first row's last cell is `title`, without that row.
pub fn rows_of_tables<'a>(text: &'a str, title: &str) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    let mut inside = None;
    for (number, line) in prose(text) {
        if !line.starts_with('|') {
            inside = None;
            continue;
        }
        let cells = cells(line);
        match inside {
            None => inside = Some(cells.last() == Some(&title)),
            Some(true) if !line.starts_with("| ---") => rows.push((number, cells)),
            Some(_) => {}
        }
    }
    rows
}

fn cells(line: &str) -> Vec<&str> {
    let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
    inner.split('|').map(str::trim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_links_and_anchors_are_found() {
        assert_eq!(code_spans("a `b` c `d e`, f"), ["b", "d e"]);
        assert_eq!(links("see [a](b.md#c), ![x](d.svg)"), ["b.md#c", "d.svg"]);
        assert_eq!(anchors("# Who's first?\n```\n# not\n```\n## A `b`-c"), ["whos-first", "a-b-c"]);
    }

    #[test]
    fn rows_are_those_of_the_tables_with_that_title() {
        let text = "| a | by |\n| --- | --- |\n| 1 | 2 |\n\n| a | b |\n| --- | --- |\n| 3 | 4 |\n";
        assert_eq!(rows_of_tables(text, "by"), [(3, vec!["1", "2"])]);
    }
}
