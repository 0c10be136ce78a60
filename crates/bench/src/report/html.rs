//! Builds a self-contained HTML page, without scripts, fonts or images from elsewhere. It follows
//! the reader's choice of light or dark, and can be printed. It is also well-formed XML.

use std::fmt::Write;

use anyhow::Result;
use shunt_abi::shown::visible;

use super::plot::Plot;

/// The style sheet. It also replaces the black and white of plotters' images by the page's colours.
const STYLE: &str = "<style>
:root{color-scheme:light dark;--back:#fff;--text:#1f2328;--faint:#59636e;--line:#d1d9e0;--box:#f6f8fa;--good:#1a7f37;--bad:#cf222e;}
@media (prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--faint:#9198a1;--line:#3d444d;--box:#151b23;--good:#3fb950;
--bad:#f85149}}
body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:var(--text);background:var(--back)}
h1{line-height:1.2;margin-bottom:.3em}h2{margin-top:2em;border-bottom:1px solid var(--line);padding-bottom:.2em}
pre{font-size:12px;line-height:1.35;overflow-x:auto;background:var(--box);padding:1em;border-radius:6px}
.plots{display:flex;flex-wrap:wrap;gap:0 2em}
figure{margin:.5em 0;overflow-x:auto;break-inside:avoid;max-width:100%}
svg{max-width:100%;height:auto}svg[width=\"1080\"]{min-width:42em}
svg text{fill:currentColor}svg rect[fill=\"#FFFFFF\"]{fill:none}svg [stroke=\"#000000\"]{stroke:currentColor}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px;margin:.5em 0}
th,td{border-bottom:1px solid var(--line);padding:.3em .9em .3em 0;text-align:left;vertical-align:top}
td:first-child{min-width:7em}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.faint{color:var(--faint)}.good{color:var(--good)}.bad{color:var(--bad)}.lead{font-size:1.25em;margin:.4em 0}
.alarm{border:2px solid var(--bad);border-radius:6px;padding:.2em 1em;margin:1em 0}.alarm pre{background:none;padding:0}
.cards{display:flex;flex-wrap:wrap;gap:1em;margin:1.2em 0}
.card{flex:1 1 11em;background:var(--box);border:1px solid var(--line);border-radius:6px;padding:.7em 1em}
.card b{display:block;font-size:1.6em;line-height:1.3}
@media print{:root{color-scheme:light;--back:#fff;--text:#000;--faint:#444;--line:#bbb;--box:#f6f6f6;--good:#1a7f37;--bad:#cf222e;}body{margin:0;max-width:none;font-size:11pt}svg[width=\"1080\"]{min-width:0}.wide,figure,pre{overflow:visible}
pre{white-space:pre-wrap}h2{break-after:avoid}tr,.card{break-inside:avoid}}
</style>";

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

/// Returns a page with plots and the text below them.
pub(crate) fn page(title: &str, plots: &[Plot], text: &str) -> Result<String> {
    let mut page = Page::new(title);
    page.figures(&plots.iter().map(Plot::svg).collect::<Result<Vec<_>>>()?);
    page.preformatted(text);
    Ok(page.finish())
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
