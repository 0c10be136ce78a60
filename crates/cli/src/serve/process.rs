//! Runs a service, and sends requests to a running one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sd_notify::NotifyState;
use serde_json::Value;
use shunt_serve::cache::{self, Cache};
use shunt_serve::engine::{self, Address, Engine, Hashing, Limit, Options, Request};
use shunt_serve::pubsub::PubSub;
use shunt_serve::service::file::Program;
use shunt_serve::service::store::Store;
use shunt_serve::service::{Service, Watched};
use tokio::signal::unix::{SignalKind, signal};

use super::{proxy, supervisor};
use crate::args::{ServeArgs, ServeEngine, ServeHash};
use crate::daemon::{notify, shutdown, start_log};
use crate::table::{Column, left, render, right};

pub(super) fn serve(args: &ServeArgs) -> Result<()> {
    if args.unverified && !supervisor::is_supervised() {
        return supervisor::supervise(args);
    }
    if args.service.as_deref() == Some(proxy::NAME) {
        return proxy::serve(args);
    }
    let options = options(args)?;
    start_log(None, None)?;
    if args.unverified {
        supervisor::be_supervised()?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let shutdown = shutdown()?;
        let reload = signal(SignalKind::hangup())?;
        let ready = || {
            tracing::info!("the service serves");
            notify(NotifyState::Ready);
        };
        engine::run(options, ready, reload, shutdown).await.map_err(anyhow::Error::from)
    })
}

pub(super) fn status(control: &Path, json: bool) -> Result<()> {
    let status = engine::ask(control, Request::Status)?;
    let report = if proxy::is_proxy(&status) { proxy::report } else { report };
    print!("{}", if json { format!("{status:#}\n") } else { report(&status) });
    Ok(())
}

pub(super) fn reload(control: &Path) -> Result<()> {
    engine::ask(control, Request::Reload)?;
    Ok(())
}

pub(super) fn register(control: &Path, address: &Address, weight: u32) -> Result<()> {
    engine::ask(control, Request::Register { address: address.to_string(), weight })?;
    Ok(())
}

pub(super) fn unregister(control: &Path, address: &Address) -> Result<()> {
    engine::ask(control, Request::Unregister(address.to_string()))?;
    Ok(())
}

fn options(args: &ServeArgs) -> Result<Options> {
    let parts = parts(args)?;
    Ok(Options {
        service: parts.service,
        object: parts.object,
        store: parts.store,
        contents: parts.contents,
        limit: parts.limit,
        verify: parts.verify,
        listen: args.listen.clone(),
        files: args.content.clone(),
        may_register: args.allow_register.clone(),
        backends: args.backends.as_deref().map(std::path::absolute).transpose()?,
        engine: match args.engine {
            ServeEngine::Auto if args.service.as_deref() == Some(PUBSUB) => Engine::User,
            ServeEngine::Auto => Engine::Auto,
            ServeEngine::Kernel => Engine::Kernel,
            ServeEngine::User => Engine::User,
        },
        hashing: args.hash.map(|hash| match hash {
            ServeHash::Modulo => Hashing::Modulo,
            ServeHash::Ketama => Hashing::Ketama,
            ServeHash::Service => Hashing::Service,
        }),
        threads: args.threads as usize,
        control: args.control.control.clone(),
        metrics: args.metrics,
        drain: Duration::from_secs(args.drain),
    })
}

/// A service, with the memory that its halves share.
struct Parts {
    service: Arc<dyn Service>,
    object: Vec<u8>,
    store: Arc<Store>,
    contents: Option<Arc<Store>>,
    limit: Option<Limit>,
    verify: bool,
}

fn parts(args: &ServeArgs) -> Result<Parts> {
    let name = args.service.as_deref().context("say which SERVICE")?;
    let in_kernel = args.engine != ServeEngine::User;
    // Buckets of the rate limit are behind the service's state.
    let limit =
        |state: usize| args.rate.map(|rate| Limit::new(rate as f64, args.burst.unwrap_or(rate), state));
    let store = |limit: &Option<Limit>, state, in_kernel| {
        Store::new(limit.as_ref().map_or(state, Limit::size), in_kernel)
    };
    if name == CACHE {
        let memory = usize::try_from(args.memory << 20).unwrap_or(usize::MAX);
        let cache = Cache::new(memory, args.threads as usize, in_kernel)?;
        let (limit, contents) = (limit(0), Some(cache.store().clone()));
        let (object, store) = (cache::object().to_vec(), store(&limit, 0, in_kernel)?);
        return Ok(Parts { service: Arc::new(cache), object, store, contents, limit, verify: false });
    }
    if name == PUBSUB {
        ensure!(args.engine != ServeEngine::Kernel, "{PUBSUB} runs in user space only");
        let service = Arc::new(PubSub::default());
        let limit = limit(0);
        let store = store(&limit, 0, false)?;
        return Ok(Parts { service, object: Vec::new(), store, contents: None, limit, verify: false });
    }
    let program = Program::open(name)?;
    let limit = limit(program.native.state());
    let store = store(&limit, program.native.state(), in_kernel)?;
    let native = program.native.with_store(store.clone());
    let service: Arc<dyn Service> =
        if args.unverified { Arc::new(Watched(native)) } else { Arc::new(native) };
    let verify = !args.unverified && !program.is_builtin;
    Ok(Parts { service, object: program.object, store, contents: None, limit, verify })
}

/// The names of the services that are not compiled from C alone.
const CACHE: &str = "builtin:cache";
const PUBSUB: &str = "builtin:pubsub";

/// Returns the status as text.
fn report(status: &Value) -> String {
    let of = |value: &Value, name: &str| value[name].as_u64().unwrap_or(0).to_string();
    let word = |value: &Value, name: &str| value[name].as_str().unwrap_or("?").to_owned();
    let mut text = format!(
        "{} at {}, engine {}: {} clients, {} of them in the kernel\n\
         messages in user space {}, in the kernel {}, replies {}\n",
        word(status, "service"),
        word(status, "listen"),
        word(status, "engine"),
        of(status, "open-connections"),
        of(status, "in-kernel"),
        of(&status["user"], "messages"),
        of(&status["kernel"], "messages"),
        of(status, "replies"),
    );
    if let Some(why) = status["without-kernel"].as_str() {
        text += &format!("not in the kernel: {why}\n");
    }
    if let Some(why) = status["stays-in-map"].as_str() {
        text += &format!("slower after a time in the kernel, until the connection ends: {why}\n");
    }
    let list = |name: &str| status[name].as_array().cloned().unwrap_or_default();
    if status["kernel-half"] == "loading" {
        text += "the kernel half is being loaded; user space serves meanwhile\n";
    }
    if status["kernel-half"] == "loaded" {
        let without = list("backends").into_iter().filter(|backend| backend["kernel"] == false);
        let without: Vec<String> = without.map(|backend| word(&backend, "address")).collect();
        if !without.is_empty() {
            let which = without.join(", ");
            text += &format!(
                "in user space only, as they have no place in the kernel until a restart: {which}\n"
            );
        }
    }
    let registrations = &status["registrations"];
    if ["done", "refused"].iter().any(|name| registrations[name].as_u64().is_some_and(|count| count > 0)) {
        let (done, refused) = (of(registrations, "done"), of(registrations, "refused"));
        text +=
            &format!("the service changed its backends {done} times, and was refused that {refused} times\n");
    }
    let backends: Vec<Vec<String>> = list("backends")
        .iter()
        .map(|backend| {
            let state = if backend["up"] == true { "up" } else { "down" };
            let numbers = ["messages", "bytes", "connections", "failures"].map(|name| of(backend, name));
            [word(backend, "address"), state.to_owned()].into_iter().chain(numbers).collect()
        })
        .collect();
    let moves: Vec<Vec<String>> =
        list("moves").iter().map(|it| vec![word(it, "reason"), of(it, "count"), word(it, "text")]).collect();
    let drops = status["drops"].as_object().into_iter().flatten();
    let drops: Vec<Vec<String>> =
        drops.map(|(reason, count)| vec![reason.clone(), count.to_string()]).collect();
    let state = super::state::rows(status);
    for (columns, rows) in
        [(&BACKENDS[..], backends), (&MOVES[..], moves), (&DROPS[..], drops), (&super::state::COLUMNS, state)]
    {
        if !rows.is_empty() {
            text += &format!("\n{}", render(columns, &rows));
        }
    }
    text
}

const BACKENDS: [Column; 6] = [
    left("BACKEND", 0),
    left("STATE", 0),
    right("MESSAGES", 0),
    right("BYTES", 0),
    right("CONNECTIONS", 0),
    right("FAILURES", 0),
];
const MOVES: [Column; 3] = [left("MOVE", 0), right("COUNT", 0), left("BECAUSE", 0)];
const DROPS: [Column; 2] = [left("NOT SERVED", 0), right("COUNT", 0)];
