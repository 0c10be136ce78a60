//! Builds a self-contained HTML page, without scripts, fonts or images from elsewhere. It follows
//! the reader's choice of light or dark, and can be printed. It is also well-formed XML.

use std::fmt::Write;

use shunt_abi::shown::visible;

/// The style sheet. It also replaces the black and white of plotters' images by the page's colours.
const STYLE: &str = concat!("<style>\n", include_str!("style.css"), "</style>");

/// A page under construction.
pub(crate) struct Page {
    text: String,
}

/// The contents of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Words,
    Numbers,
}

impl Page {
    pub(crate) fn new(title: &str) -> Page {
        let title = escape(title);
        Page {
            text: format!(
                "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\
                 <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><title>{title}</title>\n\
                 {STYLE}</head><body>\n<h1>{title}</h1>\n"
            ),
        }
    }

    /// Starts a section.
    pub(crate) fn heading(&mut self, text: &str) {
        let _ = writeln!(self.text, "<h2>{}</h2>", escape(text));
    }

    /// Appends a paragraph, with a class unless it is empty.
    pub(crate) fn paragraph(&mut self, class: &str, text: &str) {
        let _ = writeln!(self.text, "<p class=\"{class}\">{}</p>", escape(text));
    }

    /// Appends preformatted text.
    pub(crate) fn preformatted(&mut self, text: &str) {
        let _ = writeln!(self.text, "<pre>{}</pre>", escape(text));
    }

    /// Appends a warning.
    pub(crate) fn alarm(&mut self, text: &str) {
        let _ = writeln!(self.text, "<div class=\"alarm bad\"><pre>{}</pre></div>", escape(text));
    }

    /// Appends a row of figures, each with its meaning and a class.
    pub(crate) fn cards(&mut self, cards: &[(&str, String, String)]) {
        self.text.push_str("<div class=\"cards\">\n");
        for (class, figure, what) in cards {
            let _ = writeln!(
                self.text,
                "<div class=\"card\"><b class=\"{class}\">{}</b><span class=\"faint\">{}</span></div>",
                escape(figure),
                escape(what)
            );
        }
        self.text.push_str("</div>\n");
    }

    /// Appends SVG images, in rows where there is room.
    pub(crate) fn figures(&mut self, images: &[String]) {
        self.text.push_str("<div class=\"plots\">\n");
        for image in images {
            let _ = writeln!(self.text, "<figure>{image}</figure>");
        }
        self.text.push_str("</div>\n");
    }

    /// Appends a table with a head.
    pub(crate) fn table(&mut self, head: &[(&str, Column)], rows: &[Vec<String>]) {
        let class = |column: Column| if column == Column::Numbers { " class=\"number\"" } else { "" };
        self.text.push_str("<div class=\"wide\"><table><thead><tr>");
        for (title, column) in head {
            let _ = write!(self.text, "<th{}>{}</th>", class(*column), escape(title));
        }
        self.text.push_str("</tr></thead><tbody>\n");
        for row in rows {
            self.text.push_str("<tr>");
            for ((_, column), cell) in head.iter().zip(row) {
                let _ = write!(self.text, "<td{}>{}</td>", class(*column), escape(cell));
            }
            self.text.push_str("</tr>\n");
        }
        self.text.push_str("</tbody></table></div>\n");
    }

    pub(crate) fn finish(mut self) -> String {
        self.text.push_str("</body></html>\n");
        self.text
    }
}

/// Returns a page with images and the text below them.
pub(crate) fn page(title: &str, images: &[String], text: &str) -> String {
    let mut page = Page::new(title);
    page.figures(images);
    page.preformatted(text);
    page.finish()
}

/// Escapes text for a page, and removes characters that XML forbids: programs can print anything.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(c),
            _ => out.push_str(&visible(c.encode_utf8(&mut [0; 4]))),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_programs_print_is_text() {
        assert_eq!(
            escape("<script>\"a\" & b\n\u{1b}[0m\0"),
            "&lt;script&gt;&quot;a&quot; &amp; b\n\\u{1b}[0m\\u{0}"
        );
        let mut page = Page::new("<title>");
        page.table(&[("<th>", Column::Words)], &[vec!["<td>".to_owned()]]);
        page.cards(&[("good", "<b>".to_owned(), "<i>".to_owned())]);
        page.alarm("<alarm>");
        let page = page.finish();
        for raw in ["<title><", "<th><", "<td><td>", "<b><", "<i>", "<alarm>"] {
            assert!(!page.contains(raw), "{raw}");
        }
    }
}
