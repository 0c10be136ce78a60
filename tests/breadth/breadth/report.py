"""The table of tests/breadth/RESULTS.md, and what counts as a difference."""

HEAD = """# Breadth

The tests that Debian's packages carry themselves, each run natively and with shunt for the whole system
(`/etc/ld.so.preload` and a system broker), by `sudo tests/breadth/run`, which writes this page. How it is done and how to
read it: [README.md](README.md).

"""


def ran(found):
    return [test for test in found["tests"] if not test["left_out"]]


def passed(found, side):
    return [test for test in ran(found) if test.get(side, {}).get("status") == "pass"]


def is_chance(test):
    """Whether a test that failed under shunt also passes there and also fails natively, when both are repeated."""
    again = test.get("again")
    return bool(again) and "pass" in again["shunt"] and set(again["native"]) != {"pass"}


def differs(test):
    """Whether a test that passes natively does not under shunt, or leaves a core there and natively none."""
    native, shunt = test.get("native"), test.get("shunt")
    if not native or not shunt:
        return False
    if len(shunt.get("cores", [])) > len(native.get("cores", [])):
        return True
    return shunt["status"] != "pass" and not is_chance(test)


def repeated(test):
    """How a differing test ended when it was repeated, in words."""
    again = test.get("again")
    if not again:
        return test["name"]
    counts = {side: f"{statuses.count('pass') + (side == 'native')} of {len(statuses) + 1}" for side, statuses in again.items()}
    return f"{test['name']} (passes {counts['native']} times natively, {counts['shunt']} under shunt)"


def accepted(found):
    """Connections that were accepted under shunt."""
    return sum(test["shunt"].get("accepted", 0) for test in ran(found) if "shunt" in test)


def share(found):
    """Of the ends of connections that programs used: how many, how many were offered, how many took shared memory."""
    shares = [test["shunt"].get("share", {}) for test in ran(found) if "shunt" in test]
    return [sum(share.get(key, 0) for share in shares) for key in ("seen", "offered", "on_shm")]


def row(found):
    name = f"{found['package']} {found['version'] or ''}".strip()
    if found["failed"]:
        return f"| {name} | | | | cannot be installed: {found['failed'][:60]!r} |"
    tests = ran(found)
    left = len(found["tests"]) - len(tests)
    fails = [test["name"] for test in tests if test["native"]["status"] in ("fail", "time")]
    skips = sum(test["native"]["status"] == "skip" for test in tests)
    notes = []
    differing = [repeated(test) for test in tests if differs(test)]
    if differing:
        notes.append(f"differs: {', '.join(differing)}")
    crashed = sum(len(test["shunt"].get("cores", [])) for test in tests if "shunt" in test)
    if crashed:
        notes.append(f"cores: {crashed}")
    if fails:
        notes.append(f"fails natively: {', '.join(fails)}")
    if skips or left:
        notes.append(f"{skips + left} left out")
    chance = [repeated(test) for test in tests if is_chance(test)]
    if chance:
        notes.append(f"a matter of chance: {', '.join(chance)}")
    passes = [len(tests), *(len(passed(found, side)) for side in ("native", "shunt"))]
    cells = [name, slashed(passes), str(accepted(found)), slashed(share(found)), "; ".join(notes)]
    return "| " + " | ".join(cells).rstrip() + " |"


def slashed(counts):
    return "/".join(map(str, counts))


def table(results):
    lines = [
        "| package | tests/pass natively/of these under shunt | connections | ends used/offered/on shared memory | notes |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join(lines + [row(found) for found in results]) + "\n"


def differences(results):
    return [
        f"{found['package']}: {test['name']} passes natively, and under shunt it is: {test['shunt']['status']}"
        for found in results for test in ran(found) if differs(test)
    ]


def closing(results):
    both = sum(len(passed(found, "native")) for found in results)
    wrong = len(differences(results))
    return f"breadth: {both - wrong} passed, {wrong} failed"


def page(results, missing):
    """The whole page; `missing` are the packages of the list that have not been run."""
    installed = [found for found in results if not found["failed"]]
    asked = [found for found in installed if passed(found, "native")]
    speaking = [found for found in asked if accepted(found)]
    on_shm = [found for found in speaking if share(found)[2]]
    tests = sum(len(passed(found, "native")) for found in asked)
    wrong = differences(results)
    used, offered, lanes = (sum(counts) for counts in zip([0] * 3, *map(share, asked)))
    lines = [
        f"{tests} tests of {len(asked)} packages pass natively; {len(wrong)} of them differ under shunt. In the tests of",
        f"{len(speaking)} packages connections were made, {sum(map(accepted, asked))} in all, and in those of {len(on_shm)} some took shared memory.",
        f"Programs used {used} ends of connections; {offered} of them were offered, at their first use, and {lanes} took shared memory.",
        "The others were over before both ends had been offered, or have one end that is not under shunt.",
        "",
        table([found for found in asked if accepted(found) or differences([found])]),
        "No connection was made in the tests of these packages, which pass under shunt too:",
        ", ".join(found["package"] for found in asked if not accepted(found) and not differences([found])) + ".",
        "",
        "## What was not asked",
        "",
    ]
    groups = [
        ("No test passes natively in such a tree", [found["package"] for found in installed if ran(found) and not passed(found, "native")]),
        ("No test can be run in such a tree, or there is none", [found["package"] for found in installed if not ran(found)]),
        ("The mirror has no sources, or what the tests need cannot be installed", [found["package"] for found in results if found["failed"]]),
    ]
    lines += [f"- {what}: {', '.join(names)}." for what, names in groups if names]
    if missing:
        lines.append(f"- Not run yet: the other {len(missing)} of [the list](packages).")
    return HEAD + "\n".join(lines) + "\n"
