//! `shunt serve`: services.

mod workshop;

use anyhow::Result;

use crate::args::{ServeAction, ServeArgs};

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    match &args.action {
        ServeAction::New { name, directory } => workshop::new(name, directory),
        ServeAction::Build { source, output, define } => workshop::build(source, output.as_deref(), define),
        ServeAction::Check { service, tests, user } => workshop::check(service, tests.as_deref(), !user),
    }
}
