# Makes an image of one layer, as an archive that containerd imports: oci_image.py TREE NAME ARCHIVE
import hashlib
import io
import json
import platform
import sys
import tarfile

tree, name, archive = sys.argv[1:]
blobs = {}


def blob(kind, data):
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": "application/vnd.oci.image." + kind, "digest": digest, "size": len(data)}


def text(value):
    return json.dumps(value).encode()


packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w") as tar:
    tar.add(tree, arcname=".")
layer = blob("layer.v1.tar", packed.getvalue())
machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
# The pause container of a pod is started without a command, so the image's entrypoint sleeps.
config = {
    "architecture": machine,
    "os": "linux",
    "config": {"Entrypoint": ["sleep", "1000000"], "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
    "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
}
config = blob("config.v1+json", text(config))
manifest = blob("manifest.v1+json", text({"schemaVersion": 2, "config": config, "layers": [layer]}))
manifest["annotations"] = {"io.containerd.image.name": name}
files = {
    "oci-layout": text({"imageLayoutVersion": "1.0.0"}),
    "index.json": text({"schemaVersion": 2, "manifests": [manifest]}),
}
files.update({"blobs/" + digest.replace(":", "/"): data for digest, data in blobs.items()})
with tarfile.open(archive, "w") as tar:
    for path, data in files.items():
        info = tarfile.TarInfo(path)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
