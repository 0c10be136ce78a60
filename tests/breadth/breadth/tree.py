"""Trees that packages are installed and tested in: one base, made by mmdebstrap; one layer over it for each package; and
one fresh layer for each test, thrown away after it. All are overlays, mounted in namespaces that end with their process.
"""

import json
import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path
from xml.etree import ElementTree

SUITE = "bookworm"
MIRRORS = [
    ("http://deb.debian.org/debian", SUITE),
    ("http://deb.debian.org/debian", f"{SUITE}-updates"),
    ("http://deb.debian.org/debian-security", f"{SUITE}-security"),
]
INCLUDE = [
    "adduser", "autodep8", "build-essential", "ca-certificates", "dpkg-dev", "hostname", "init-system-helpers", "iproute2",
    "locales", "lsb-base", "mount", "netbase", "procps", "python3", "sysvinit-utils", "util-linux",
]

# The script of the first process of a tree. It removes the machine's mounts before anything else
# runs.
ENTER = r"""
set -e
root=$1 lower=$2 upper=$3 work=$4 code=$5 release=$6
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$work,xino=off" "$root"
mkdir -p "$root/breadth" "$root/old"
mount -t tmpfs -o mode=755 tmpfs "$root/breadth"
mkdir "$root/breadth/code" "$root/breadth/release"
mount --bind -o ro "$code" "$root/breadth/code"
mount --bind -o ro "$release" "$root/breadth/release"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys" 2> /dev/null || true
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -m 1777 "$root/run/lock"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
cd "$root"
pivot_root . old
umount -l /old
cd /
exec python3 /breadth/code/inside.py
"""


class Forest:
    """The base, and what grows on it."""

    def __init__(self, data, release, code, say):
        self.data = data
        self.base = data / "base"
        self.release = release
        self.code = code
        self.say = say

    def command(self, name, package):
        """Installs a command that the machine lacks."""
        if not shutil.which(name):
            self.say(f"installing {package}")
            subprocess.run(["apt-get", "install", "-y", "-qq", package], check=True, stdout=subprocess.DEVNULL)

    def plant(self):
        """Makes the base where there is none."""
        self.data.mkdir(parents=True, exist_ok=True)
        if self.base.exists():
            return
        self.command("mmdebstrap", "mmdebstrap")
        self.say("making the base tree")
        half = self.data / "base.part"
        shutil.rmtree(half, ignore_errors=True)
        sources = "".join(f"deb {url} {suite} main\n" for url, suite in MIRRORS)
        subprocess.run(
            ["mmdebstrap", "--mode=root", "--variant=apt", f"--include={','.join(INCLUDE)}", "--quiet", SUITE, half, "-"],
            input=sources, text=True, check=True,
        )
        (half / "etc/apt/sources.list.d").mkdir(exist_ok=True)
        (half / "etc/apt/sources.list.d/source.list").write_text(sources.replace("deb ", "deb-src "))
        half.rename(self.base)
        ready = self.enter({"what": "base"}, [self.base], self.base_layer(), network=True, timeout=900)
        if not ready or ready["failed"]:
            shutil.rmtree(self.base)
            raise SystemExit(f"breadth: the base tree cannot be set up: {ready}")

    def base_layer(self):
        return self.data / "base-layer"

    def layer(self, name):
        return self.data / "layers" / name

    def fell(self, name):
        shutil.rmtree(self.layer(name), ignore_errors=True)

    def install(self, name, timeout=1200):
        """Installs what the tests of `name` need, in a layer of its own. Says which tests there are."""
        layer = self.layer(name)
        ready = layer / "breadth.json"
        if ready.exists():
            return json.loads(ready.read_text())
        self.fell(name)
        spec = {"what": "install", "package": name}
        found = self.enter(spec, [self.base_layer(), self.base], layer, network=True, timeout=timeout)
        found = found or {"failed": "took too long"}
        pom = self.code / "programs" / name / "pom.xml"
        if not found["failed"] and pom.exists():
            found.update(self.jars(pom, layer))
        if not found["failed"]:
            ready.write_text(json.dumps(found))
        return found

    def jars(self, pom, layer):
        """Brings what a program's pom.xml asks for, and all that it depends on, into its layer, by the Maven of the machine,
        which knows how it reaches a registry. The program's version is that of the first."""
        self.command("mvn", "maven")
        where = layer / "upper/home/tester/source/jars"
        done = subprocess.run(
            ["mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies", f"-DoutputDirectory={where}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        if done.returncode:
            return {"failed": f"mvn: {done.stdout[-1500:]}"}
        return {"version": ElementTree.parse(pom).find(".//{*}dependency/{*}version").text}

    def test(self, name, spec, timeout, keep):
        """Runs one test in a fresh layer. What it leaves in /breadth-results is copied to `keep`."""
        layer = self.data / "tests" / str(uuid.uuid4())
        try:
            lower = [self.layer(name), self.base_layer(), self.base]
            found = self.enter(spec, lower, layer, network=False, timeout=timeout)
            left = layer / "upper/breadth-results"
            if left.exists():
                shutil.rmtree(keep, ignore_errors=True)
                shutil.copytree(left, keep)
            return found
        finally:
            shutil.rmtree(layer, ignore_errors=True)

    def enter(self, spec, lower, layer, network, timeout):
        """Runs inside.py in the tree, and gives its answer; None where it did not come in time."""
        upper, work, root = layer / "upper", layer / "work", layer / "root"
        for directory in (upper, work, root):
            directory.mkdir(parents=True, exist_ok=True)
        (upper / "breadth-spec.json").write_text(json.dumps(spec))
        answer = upper / "breadth-answer.json"
        answer.unlink(missing_ok=True)
        if network:
            (upper / "etc").mkdir(exist_ok=True)
            for file in ("resolv.conf", "hosts"):
                shutil.copy(f"/etc/{file}", upper / "etc" / file)
        kinds = ["--mount", "--pid", "--ipc", "--uts"] + ([] if network else ["--net"])
        lowers = ":".join(str(path / "upper") if path != self.base else str(path) for path in lower)
        with open(layer / "log", "w") as log:
            process = subprocess.Popen(
                ["unshare", *kinds, "--fork", "--kill-child", "--propagation", "private", "bash", "-c", ENTER, "enter",
                 root, lowers, upper, work, self.code, self.release],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(work, ignore_errors=True)
        if not answer.exists():
            return None
        found = json.loads(answer.read_text())
        answer.unlink()  # The layers above are to find none.
        return found
