"""One package: its tests run natively, and, those that pass so, under shunt too."""

SIDES = (("native", False), ("shunt", True))
# Number of times that a differing test is run again on each side, to find out whether it always
# passes natively.
AGAIN = 4


def listed(path):
    """The names in the list of packages, each with whether it is marked as quick."""
    for line in path.read_text().splitlines():
        words = line.split("#")[0].split()
        if words:
            yield words[0], "quick" in words[1:]


def run(forest, name, timeout, env, say):
    say(f"{name}: installing")
    ready = forest.install(name)
    if ready["failed"]:
        say(f"{name}: cannot be installed")
        return {"package": name, "version": None, "failed": ready["failed"], "tests": []}
    tests = []
    for test in ready["tests"]:
        found = {"name": test["name"], "left_out": test["left_out"]}
        tests.append(found)
        if test["left_out"]:
            continue

        def once(side, shunt):
            spec = {"what": "test", "shunt": shunt, "timeout": timeout, "env": env, **test}
            keep = forest.data / "logs" / name / test["name"].replace("/", "_") / side
            # Setting up and starting services has its own limits; this one is for a tree that
            # hangs.
            done = forest.test(name, spec, timeout + 300, keep) or {"failed": "no answer"}
            if done["failed"]:
                done["status"] = "fail"
            say(f"{name}: {test['name']}: {side} {done['status']}")
            return done

        for side, shunt in SIDES:
            found[side] = once(side, shunt)
            # A test that does not pass natively proves nothing, whatever its result under shunt.
            if found[side]["status"] != "pass":
                break
        if "shunt" in found and found["shunt"]["status"] != "pass":
            found["again"] = {side: [once(side, shunt)["status"] for _ in range(AGAIN)] for side, shunt in SIDES}
    return {"package": name, "version": ready["version"], "failed": None, "tests": tests}
