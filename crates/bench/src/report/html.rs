//! One page that needs nothing else: plots, and the text beneath.

use std::fmt::Write;

use anyhow::Result;

use super::plot::Plot;

const STYLE: &str = "<style>\
    body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}\
    pre{font-size:12px;line-height:1.35;overflow-x:auto;background:#f6f6f6;padding:1em}\
    figure{margin:1em 0}svg{max-width:100%;height:auto}</style>";

/// Any page.
pub(crate) fn page(title: &str, plots: &[Plot], text: &str) -> Result<String> {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n{STYLE}</head><body>\n\
         <h1>{title}</h1>\n"
    );
    for plot in plots {
        let _ = writeln!(page, "<figure>{}</figure>", plot.svg()?);
    }
    let _ = writeln!(page, "<pre>{}</pre></body></html>", escape(text));
    Ok(page)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
