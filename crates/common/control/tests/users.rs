//! The users that may use a control socket. Needs root, to act as other users.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use serde_json::{Value, json};
use shunt_control::{AskError, Asked, Control, ask};
use tokio::sync::mpsc;

const ROOT: u32 = 0;
const OWNER: u32 = 65_533;
const OTHER: u32 = 65_534;

/// Runs `work` as another user, on a new thread whose user ids are changed.
fn as_user<T: Send>(user: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let user = Uid::from_raw(user);
            set_thread_res_uid(user, user, user).unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

/// Runs a daemon as `user` while `work` is done, and returns the number of requests that it got.
/// The mode of its socket lets all users connect.
fn while_it_runs(user: u32, directory: &Path, work: impl FnOnce(PathBuf)) -> usize {
    let path = directory.join("control.sock");
    let (ready, is_ready) = std::sync::mpsc::channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    std::thread::scope(|scope| {
        let there = path.clone();
        let server = scope.spawn(move || {
            as_user(user, || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let control = Control::open("thing", &there).unwrap();
                    set_permissions(&there, Permissions::from_mode(0o666)).unwrap();
                    ready.send(()).unwrap();
                    let (sender, mut asked) = mpsc::channel::<Asked<Value>>(1);
                    let mut times = 0;
                    let answering = async {
                        while let Some((request, answer)) = asked.recv().await {
                            times += 1;
                            answer.send(Ok(request)).unwrap();
                        }
                    };
                    tokio::select! {
                        () = control.serve(sender) => unreachable!(),
                        () = answering => unreachable!(),
                        _ = stopped => {}
                    }
                    times
                })
            })
        });
        is_ready.recv().unwrap();
        work(path);
        drop(stop);
        server.join().unwrap()
    })
}

#[test]
fn only_its_user_and_root_may_ask() {
    let directory = tempfile::tempdir().unwrap();
    set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
    for (owner, welcome, unwelcome) in [(ROOT, &[ROOT][..], OTHER), (OWNER, &[OWNER, ROOT], OTHER)] {
        let times = while_it_runs(owner, directory.path(), |path| {
            for user in welcome {
                let answer = as_user(*user, || ask("thing", &path, &json!("status")));
                assert_eq!(answer.unwrap(), json!("status"), "user {user} of {owner}'s");
            }
            let refusal = as_user(unwelcome, || ask("thing", &path, &json!("status")));
            assert!(matches!(refusal, Err(AskError::Refused(_))), "{refusal:?}");
        });
        assert_eq!(times, welcome.len(), "what a stranger says is handed on");
    }
}
