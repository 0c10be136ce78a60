//! `shunt bugreport` reports the state, and no secret.

mod common;

use common::{Ended, Shell};

const SECRET: &str = "correct-horse-battery";

#[test]
fn a_report_has_no_secret() {
    let shell = Shell::new();
    // A program under shunt has the secret in its environment, its arguments, its name's file and its connection.
    let ended = shell.sh(&format!(
        r#"export PASSWORD={SECRET} SHUNT_SPIN=off
printf '# {SECRET}\n[run]\noffer = "at-once"\n' > "$XDG_RUNTIME_DIR/shunt.toml"
export SHUNT_CONFIG="$XDG_RUNTIME_DIR/shunt.toml"
cat > "$XDG_RUNTIME_DIR/talk.py" <<'END_OF_FILE'
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
for _ in range(100):
    client.sendall(sys.argv[1].encode())
    server.sendall(server.recv(100))
    client.recv(100)
print("ready", flush=True)
sys.stdin.read()
END_OF_FILE
mkfifo "$XDG_RUNTIME_DIR/in" "$XDG_RUNTIME_DIR/out"
$SHUNT run -- python3 "$XDG_RUNTIME_DIR/talk.py" {SECRET} < "$XDG_RUNTIME_DIR/in" > "$XDG_RUNTIME_DIR/out" &
exec 3> "$XDG_RUNTIME_DIR/in"
read -r ready < "$XDG_RUNTIME_DIR/out"
$SHUNT bugreport -o "$XDG_RUNTIME_DIR/report"
code=$?
exec 3>&-
wait
exit $code"#
    ));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let path = shell.path("report");
    let report = std::fs::read_to_string(&path).unwrap();
    assert!(!report.contains(SECRET), "{report}");
    for part in [
        "== version ==\nshunt ",
        "== shunt doctor ==\n",
        "\"program\": \"python3\"",
        "SHUNT_SPIN=off",
        "at-once",
        "== machine ==\nLinux version ",
    ] {
        assert!(report.contains(part), "no {part}: {report}");
    }
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // An existing file is not replaced.
    let mut again = shell.shunt(["bugreport", "-o"]);
    again.arg(&path);
    assert_eq!(Ended::of(again).code, Some(1));
}
