//! `shunt serve`: runs, creates and checks services.

mod process;
mod proxy;
mod state;
mod supervisor;
mod workshop;

use anyhow::Result;

use crate::args::{ServeAction, ServeArgs};

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    match &args.action {
        None => process::serve(args),
        Some(ServeAction::Status { control, json }) => process::status(&control.control, *json),
        Some(ServeAction::Dump { name, control, json }) => state::dump(&control.control, name, *json),
        Some(ServeAction::Reload { control }) => process::reload(&control.control),
        Some(ServeAction::Register { address, weight, control }) => {
            process::register(&control.control, address, *weight)
        }
        Some(ServeAction::Unregister { address, control }) => process::unregister(&control.control, address),
        Some(ServeAction::New { name, directory, stateful, contents }) => {
            workshop::new(name, directory, workshop::template(*stateful, *contents))
        }
        Some(ServeAction::Build { source, output, define }) => {
            workshop::build(source, output.as_deref(), define)
        }
        Some(ServeAction::Check { service, tests, user }) => {
            workshop::check(service, tests.as_deref(), !user)
        }
    }
}
