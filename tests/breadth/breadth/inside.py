"""What runs in a tree, as the first process of its namespaces: sets the base up, installs a package, or runs one test of
one. Reads /breadth-spec.json and writes /breadth-answer.json. Needs Python alone.
"""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

USER = "tester"
SOURCE = Path("/home") / USER / "source"
RESULTS = Path("/breadth-results")
# Programs with scripts of this project, each laid out like a package's own tests.
PROGRAMS = Path("/breadth/code/programs")
# The base's own services, which no package tests.
SERVICES = Path("/breadth-services")
NO_SERVICES = Path("/usr/sbin/policy-rc.d")
PRELOAD = Path("/etc/ld.so.preload")
LIBRARY = "/usr/local/lib/shunt/libshunt.so"
SHUNT = "/usr/local/bin/shunt"

# Forwards the requests of tests to systemd to the init scripts. Only for a tree without systemd.
SYSTEMCTL = """#!/bin/sh
words=
for word; do
    case $word in -*) ;; *) words="$words ${word%.service}" ;; esac
done
set -- $words
action=$1
[ $# -gt 0 ] && shift
for unit; do
    case $action in
        start | stop | restart | reload | status) service "$unit" "$action" || exit ;;
        reload-or-restart | try-restart) service "$unit" restart || exit ;;
        is-active) service "$unit" status > /dev/null 2>&1 || exit 3 ;;
    esac
done
"""

# The restrictions that this runner supports, as autopkgtest does; a test with any other is skipped,
# as there.
MET = {
    "allow-stderr", "breaks-testbed", "flaky", "hint-testsuite-triggers", "isolation-container", "needs-recommends", "needs-root",
    "rw-build-tree", "skip-foreign-architecture", "skip-not-installable", "skippable", "superficial",
}


def call(*command, **more):
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


def must(*command, **more):
    done = call(*command, **more)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))[:200]}: {done.stdout[-1500:]}")
    return done.stdout


def base(_):
    must("apt-get", "update", "-qq")
    must("adduser", "--disabled-password", "--gecos", "", USER)
    Path("/usr/share/man/man1").mkdir(parents=True, exist_ok=True)
    SERVICES.write_text(" ".join(script.name for script in Path("/etc/init.d").iterdir()))
    return {}


def stanzas(text):
    """The paragraphs of a control file, each a dictionary with keys in small letters."""
    paragraph, key = {}, None
    for line in text.splitlines() + [""]:
        if line.startswith("#"):
            continue
        if not line.strip():
            if paragraph:
                yield paragraph
            paragraph, key = {}, None
        elif line[0].isspace() and key:
            paragraph[key] += " " + line.strip()
        elif ":" in line:
            key, value = line.split(":", 1)
            key = key.strip().lower()
            paragraph[key] = value.strip()


def words(text):
    return text.replace(",", " ").split()


def tests_of(control):
    """The tests that debian/tests/control names, in its order."""
    found = []
    for stanza in stanzas(control):
        common = {
            "restrictions": words(stanza.get("restrictions", "")),
            "depends": stanza.get("depends", "@"),
            "directory": stanza.get("tests-directory", "debian/tests"),
        }
        for feature in words(stanza.get("features", "")):
            if feature.startswith("test-name="):
                common["name"] = feature.removeprefix("test-name=")
        if "test-command" in stanza:
            found.append({"name": f"command{len(found) + 1}", **common, "command": stanza["test-command"]})
        for name in words(stanza.get("tests", "")):
            found.append({**common, "name": name, "command": None})
    for test in found:
        unmet = sorted(set(test["restrictions"]) - MET)
        test["left_out"] = f"needs {', '.join(unmet)}" if unmet else None
    return found


def own_packages(control):
    """The binary packages that a source package makes for this architecture."""
    for stanza in list(stanzas(control))[1:]:
        kinds = stanza.get("architecture", "any").split()
        if stanza.get("package-type") != "udeb" and set(kinds) & {"any", "all", "amd64", "linux-any", "any-amd64"}:
            yield stanza["package"]


def known(package):
    return call("apt-cache", "show", package).returncode == 0


def fetch(name, environment):
    """Brings the source of a package here: its tests, its binary packages, and its version."""
    place = Path("/home") / USER
    # For some updates, the mirrors have the programs before the sources; then the release's own
    # sources are used.
    if call("apt-get", "source", "-qq", "--only-source", name, cwd=place, env=environment).returncode:
        must("apt-get", "source", "-qq", "--only-source", f"{name}/bookworm", cwd=place, env=environment)
    source = next(path for path in place.iterdir() if path.is_dir() and (path / "debian/control").exists())
    source.rename(SOURCE)
    control = (SOURCE / "debian/control").read_text(errors="replace")
    listed = SOURCE / "debian/tests/control"
    text = listed.read_text(errors="replace") if listed.exists() else ""
    if "autopkgtest-pkg-" in next(stanzas(control)).get("testsuite", ""):
        text = must("autodep8", cwd=SOURCE)
    tests = tests_of(text)
    own = [package for package in own_packages(control) if known(package)]
    version = must("dpkg-parsechangelog", "-S", "Version", cwd=SOURCE).strip()
    return tests, own, version


def install(spec):
    name = spec["package"]
    NO_SERVICES.write_text("#!/bin/sh\nexit 101\n")
    NO_SERVICES.chmod(0o755)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"}
    ours = PROGRAMS / name
    if ours.is_dir():
        shutil.copytree(ours, SOURCE / "debian/tests")
        tests, own, version = tests_of((ours / "control").read_text()), [], None
    else:
        tests, own, version = fetch(name, environment)
    wanted = []
    for test in tests:
        if test["left_out"]:
            continue
        for clause in test["depends"].split(","):
            clause = clause.strip()
            if clause == "@":
                wanted += own
            elif clause == "@builddeps@":
                must("apt-get", "build-dep", "-y", "-qq", "--no-install-recommends", "./", cwd=SOURCE, env=environment)
            elif clause and not clause.startswith("@"):
                wanted.append(clause)
    recommends = any("needs-recommends" in test["restrictions"] or "@recommends@" in test["depends"] for test in tests)
    wanted = list(dict.fromkeys(wanted))
    if wanted:
        flag = "--install-recommends" if recommends else "--no-install-recommends"
        must("apt-get", "satisfy", "-y", "-qq", flag, ", ".join(wanted), cwd="/", env=environment)
    must("apt-get", "clean")
    # The version of a program is that of the first package that its script asks for.
    version = version or must("dpkg-query", "-W", "-f", "${Version}", wanted[0])
    must("chown", "-R", f"{USER}:{USER}", SOURCE)
    NO_SERVICES.unlink()
    return {"version": version, "tests": tests}


def begin_shunt(settings):
    """A system broker, and the shim in every program that starts from here on, with these settings: also in services, and in
    sessions that begin with an environment of their own."""
    os.environ.update(settings)
    with open("/etc/environment", "a") as file:
        file.writelines(f"{name}={value}\n" for name, value in settings.items())
    Path(LIBRARY).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy("/breadth/release/libshunt.so", LIBRARY)
    shutil.copy("/breadth/release/shunt", SHUNT)
    must(SHUNT, "daemon", "--system", "--detach", "--log-file", "/var/log/shunt.log")
    PRELOAD.write_text(LIBRARY + "\n")


def services():
    """Starts what the installed packages would have started by themselves on a machine."""
    there = set(SERVICES.read_text().split())
    for script in sorted(Path("/etc/init.d").iterdir()):
        if script.name in there or not os.access(script, os.X_OK):
            continue
        try:
            with open(RESULTS / "services", "a") as log:
                subprocess.run([script, "start"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60)
        except subprocess.TimeoutExpired:
            pass


def counts():
    """What TCP and the broker have counted since the tree began."""
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
    tcp = dict(zip(lines[0], lines[1]))
    found = {"accepted": int(tcp["PassiveOpens"])}
    if PRELOAD.exists():
        status = json.loads(subprocess.run([SHUNT, "status", "--json"], stdout=subprocess.PIPE, text=True).stdout or "{}")
        found["share"] = status.get("share", {})
        found["refused"] = status.get("offers_refused", {})
        found["bad_messages"] = status.get("bad_messages", {})
    return found


def is_core(path):
    try:
        with open(path, "rb") as file:
            head = file.read(18)
    except OSError:
        return False
    return head[:4] == b"\x7fELF" and head[16:18] == b"\x04\x00"


def cores():
    """Programs that died and left a core, by the file that the kernel wrote."""
    found = []
    for top in ("/home", "/tmp", "/var", "/root", "/etc", "/run"):
        for directory, _, files in os.walk(top):
            found += [path for path in (os.path.join(directory, file) for file in files if file.startswith("core")) if is_core(path)]
    found += [path for path in ("/core",) if os.path.exists(path)]
    return found


def test(spec):
    RESULTS.mkdir(exist_ok=True)
    must("ip", "link", "set", "lo", "up")
    must("hostname", "breadth")
    Path("/etc/hosts").write_text("127.0.0.1 localhost breadth\n::1 localhost ip6-localhost ip6-loopback\n")
    Path("/etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
    SOURCE.parent.chmod(0o755)  # Some tests make users of their own.
    if not shutil.which("systemctl"):
        Path("/usr/local/bin/systemctl").write_text(SYSTEMCTL)
        Path("/usr/local/bin/systemctl").chmod(0o755)
    # Most connections of tests are too short to be offered otherwise.
    settings = {"SHUNT_OFFER": "at-once", **dict(pair.split("=", 1) for pair in spec["env"])} if spec["shunt"] else {}
    if spec["shunt"]:
        begin_shunt(settings)
    services()
    before = counts()
    is_root = "needs-root" in spec["restrictions"]
    user = pwd.getpwnam("root" if is_root else USER)
    scratch = Path("/tmp/autopkgtest")
    artifacts = scratch / "artifacts"
    for directory in (scratch, scratch / "tmp", artifacts):
        directory.mkdir()
        os.chown(directory, user.pw_uid, user.pw_gid)
        directory.chmod(0o755)
    if is_root:
        call("chown", "-R", "root:root", SOURCE)
    environment = {
        "PATH": os.environ["PATH"], "HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": "/bin/bash",
        "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "AUTOPKGTEST_TMP": str(scratch / "tmp"),
        "ADTTMP": str(scratch / "tmp"), "AUTOPKGTEST_ARTIFACTS": str(artifacts), "ADT_ARTIFACTS": str(artifacts),
        "AUTOPKGTEST_NORMAL_USER": USER, "ADT_NORMAL_USER": USER, "TERM": "dumb",
        **settings,
    }
    if spec["command"] is None:
        script = SOURCE / spec["directory"] / spec["name"]
        script.chmod(0o755)
        command = [str(script)]
    else:
        command = ["bash", "-ec", spec["command"]]
    identity = ["setpriv", "--reuid", user.pw_name, "--regid", str(user.pw_gid), "--init-groups"]
    start = time.monotonic()
    with open(RESULTS / "stdout", "wb") as out, open(RESULTS / "stderr", "wb") as err:
        process = subprocess.Popen(
            ["bash", "-c", 'ulimit -c unlimited; exec "$@"', "limit", *identity, *command],
            cwd=SOURCE, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        )
        try:
            code = process.wait(spec["timeout"])
        except subprocess.TimeoutExpired:
            code = "time"
    seconds = time.monotonic() - start
    # Output on standard error is no failure here, unlike in autopkgtest: services print many
    # messages in a tree without systemd.
    if code == 77 and "skippable" in spec["restrictions"]:
        status = "skip"
    else:
        status = {0: "pass", "time": "time"}.get(code, "fail")
    after = counts()
    after["accepted"] -= before["accepted"]
    dead = cores()
    for number, path in enumerate(dead[:2]):
        if os.path.getsize(path) < 1 << 28:
            shutil.copy(path, RESULTS / f"core-{number}")
    if Path("/var/log/shunt.log").exists():
        shutil.copy("/var/log/shunt.log", RESULTS / "broker.log")
    return {"status": status, "code": code, "seconds": round(seconds, 1), "cores": dead, **after}


def main():
    spec = json.loads(Path("/breadth-spec.json").read_text())
    try:
        answer = {"failed": None, **{"base": base, "install": install, "test": test}[spec["what"]](spec)}
    except Exception as error:  # Whatever it is, the outside is told.
        answer = {"failed": f"{type(error).__name__}: {error}"}
    Path("/breadth-answer.json").write_text(json.dumps(answer))


if os.fork() == 0:
    main()
    sys.exit()
# The first process reaps orphans until the test process has ended; then all other processes end
# with it.
child = -1
signal.signal(signal.SIGTERM, signal.SIG_DFL)
while not Path("/breadth-answer.json").exists():
    try:
        os.wait()
    except ChildProcessError:
        break
