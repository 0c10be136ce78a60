//! One page that needs nothing else: tables, and a plot of every table that has an axis.

use std::fmt::Write;

use anyhow::Result;

use super::{Report, plot, text};

const HEAD: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>shunt bench local</title>\n<style>\
    body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}\
    pre{font-size:12px;line-height:1.35;overflow-x:auto;background:#f6f6f6;padding:1em}\
    figure{margin:1em 0}svg{max-width:100%;height:auto}</style></head><body>\n";

/// The page.
pub(crate) fn html(report: &Report) -> Result<String> {
    let mut page = HEAD.to_owned();
    page.push_str("<h1>shunt bench local</h1>\n");
    for table in report.tables.iter().filter(|table| table.axis.is_some()) {
        let _ = writeln!(page, "<figure>{}</figure>", plot::svg(table)?);
    }
    let _ = writeln!(page, "<pre>{}</pre></body></html>", escape(&text(report)));
    Ok(page)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
