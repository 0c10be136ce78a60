"""One package: its tests run natively, and, those that pass so, under shunt too."""

SIDES = (("native", False), ("shunt", True))
# How often a test that differed is run again on each side, to see whether it always passes natively.
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
            # Setting up and starting services has its own bounds; this one is for a tree that hangs altogether.
            done = forest.test(name, spec, timeout + 300, keep) or {"failed": "no answer"}
            if done["failed"]:
                done["status"] = "fail"
            say(f"{name}: {test['name']}: {side} {done['status']}")
            return done

        for side, shunt in SIDES:
            found[side] = once(side, shunt)
            # One that does not pass natively says nothing, however it ends under shunt.
            if found[side]["status"] != "pass":
                break
        if "shunt" in found and found["shunt"]["status"] != "pass":
            found["again"] = {side: [once(side, shunt)["status"] for _ in range(AGAIN)] for side, shunt in SIDES}
    return {"package": name, "version": ready["version"], "failed": None, "tests": tests}
