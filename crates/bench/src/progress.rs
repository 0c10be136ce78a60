//! The bar on standard error that says how far a comparison is.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// For so many turns.
pub(crate) fn bar(turns: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(turns), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len}, {eta} to go  {msg}");
    bar.with_style(style.expect("a template that is right"))
}
