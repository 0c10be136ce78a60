# A client of the container runtime interface (runtime.v1), with the calls that run a pod.
#
#     cri.py SOCKET run HANDLER GROUP NAME IMAGE MOUNT,... CAPABILITY,... COMMAND...
#         runs a pod of one container; prints its ids and its address
#     cri.py SOCKET exec CONTAINER COMMAND...
#         runs a command, with its output and its exit code
#     cri.py SOCKET remove POD
#
# A mount is HOST:CONTAINER. Capabilities are added to the usual ones. Messages are encoded by field
# numbers, because no protobuf compiler is available here.
import json
import sys

import grpc


def number(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def message(fields):
    out = b""
    for field, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int):
                out += number(field << 3) + number(one)
                continue
            if isinstance(one, dict):
                one = message(one)
            elif isinstance(one, str):
                one = one.encode()
            out += number(field << 3 | 2) + number(len(one)) + one
    return out


def parse(data):
    found, at = {}, 0

    def take():
        nonlocal at
        value, shift = 0, 0
        while True:
            at += 1
            value |= (data[at - 1] & 127) << shift
            shift += 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        key = take()
        if key & 7 == 0:
            found[key >> 3] = take()
        else:
            length = take()
            found[key >> 3] = data[at : at + length]
            at += length
    return found


channel = grpc.insecure_channel(f"unix://{sys.argv[1]}", options=[("grpc.max_receive_message_length", -1)])


def call(name, fields):
    return parse(channel.unary_unary("/runtime.v1.RuntimeService/" + name)(message(fields), timeout=60))


def run(handler, group, name, image, mounts, capabilities, *command):
    # Like the kubelet, give each container its own process namespace unless the pod requests
    # another.
    namespaces = {2: 1}
    sandbox = {1: {1: name, 2: name, 3: "default"}, 8: {1: "/" + group, 2: {1: namespaces}}}
    pod = call("RunPodSandbox", {1: sandbox, 2: handler})[1].decode()
    mounts = [mount.split(":") for mount in mounts.split(",") if mount]
    mounts = [{1: inside, 2: outside, 3: 1} for outside, inside in mounts]
    security = {1: {1: [capability for capability in capabilities.split(",") if capability]}, 3: namespaces}
    config = {1: {1: name}, 2: {1: image}, 3: list(command), 7: mounts, 15: {2: security}}
    container = call("CreateContainer", {1: pod, 2: config, 3: sandbox})[1].decode()
    call("StartContainer", {1: container})
    status = parse(call("PodSandboxStatus", {1: pod})[1])
    address = parse(status[5])[1].decode()
    print(json.dumps({"pod": pod, "container": container, "address": address}))


def execute(container, *command):
    answer = call("ExecSync", {1: container, 2: list(command), 3: 60})
    sys.stdout.buffer.write(answer.get(1, b""))
    sys.stderr.buffer.write(answer.get(2, b""))
    sys.exit(answer.get(3, 0))


def remove(pod):
    call("StopPodSandbox", {1: pod})
    call("RemovePodSandbox", {1: pod})


{"run": run, "exec": execute, "remove": remove}[sys.argv[2]](*sys.argv[3:])
