"""A stand-in for the Hugging Face hub on loopback: datasets with commits, tokens, large files, and faults on demand.

The routes are those that `huggingface_hub` 2.4 uses to read and write a dataset. Xet storage is not there: the client
falls back to Git LFS, which is. `python tests/hub.py COUNT SIZE` serves a dataset of random images from a process of
its own, for measuring.
"""

import base64
import contextlib
import hashlib
import json
import random
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from guide_code.sitebuild.image_lock import Lock, LockedFile

WRITER, STRANGER = "hf_writer", "hf_stranger"  # tokens that may write, and that may only read


@dataclass
class Dataset:
    """The history of one dataset: a list of commits, each the bytes of every path."""

    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    private: bool = False

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    def tree(self, revision: str) -> dict[str, bytes] | None:
        if revision == "main":
            return self.commits[-1][1]
        return next((tree for commit, tree in self.commits if commit == revision), None)

    def commit(self, tree: dict[str, bytes]) -> str:
        seed = f"{len(self.commits)} {sorted((path, hashlib.sha256(data).hexdigest()) for path, data in tree.items())}"
        self.commits.append((hashlib.sha1(seed.encode()).hexdigest(), tree))
        return self.head


@dataclass(frozen=True)
class Request:
    """One request, as the hub (`where` is "hub") or the host of large files ("cdn") saw it."""

    where: str
    method: str
    path: str
    headers: dict[str, str]


class Hub:
    """Serves while its `with` block lasts.

    Attributes:
        datasets: By `OWNER/NAME`.
        requests: All that came, in order.
        large: Suffixes of files that are kept as large files, on the other host.
        fault: Called with the handler and the path for each image that is asked for, and with the hash of each large
            file that is sent; returns True if it has answered.
        on_commit: Called with the handler before a commit is made; returns True if it has answered.
        after_commit: The same, after it is made and before the answer.
    """

    def __init__(self):
        self.datasets: dict[str, Dataset] = {}
        self.requests: list[Request] = []
        self.large: tuple[str, ...] = ()
        self.fault: Callable[[_Handler, str], bool] = lambda handler, path: False
        self.on_commit: Callable[[_Handler], bool] = lambda handler: False
        self.after_commit: Callable[[_Handler], bool] = lambda handler: False
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._servers = [self._server("hub"), self._server("cdn")]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def _server(self, where: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "where": where})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        return server

    def __enter__(self) -> "Hub":
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def images_asked_for(self) -> list[str]:
        """Paths of images that came as GET, on either host."""
        return [request.path for request in self.requests if request.method == "GET" and "/api/" not in request.path]


class _Handler(BaseHTTPRequestHandler):
    """Answers of both hosts."""

    hub: Hub
    where: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def setup(self):
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY: head and body are two writes

    def do_GET(self):
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append(Request(self.where, self.command, self.path, headers))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._route()

    def _route(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if self.where == "cdn":
            if not self.hub.fault(self, path):
                self.send(self.hub.objects[path.rsplit("/", 1)[-1]])
            return
        for pattern, answer in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", lambda: self.json({"warnings": [], "errors": []})),
            (r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            (r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)", lambda *parts: self._tree(*parts, query)),
            (r"/api/datasets/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            (r"/api/datasets/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            (r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            (r"/lfs/([0-9a-f]{64})", self._upload),
            (r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ):
            if match := re.fullmatch(pattern, path):
                answer(*(part and unquote(part) for part in match.groups()))
                return
        self.error(404)

    def send(self, data: bytes, status: int = 200, **headers: str) -> None:
        """Answers; an underscore in a header's name stands for a hyphen."""
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def json(self, value: object, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status, Content_Type="application/json")

    def error(self, status: int, code: str = "", **headers: str) -> None:
        self.send(b'{"error":"refused"}', status, **({"X_Error_Code": code} if code else {}) | headers)

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _readable(self, name: str) -> Dataset | None:
        """The dataset, or None once the refusal is sent."""
        dataset = self.hub.datasets.get(name)
        if dataset is not None and (not dataset.private or self.token == WRITER):
            return dataset
        self.error(404 if self.token in (WRITER, STRANGER) else 401, "RepoNotFound")
        return None

    def _writable(self) -> bool:
        if self.token == WRITER:
            return True
        self.error(403 if self.token == STRANGER else 401)
        return False

    def _create(self) -> None:
        if self._writable():
            wanted = json.loads(self.body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if name in self.hub.datasets:
                self.json({"error": "You already created this dataset repo", "url": name}, 409)
                return
            self.hub.datasets[name] = Dataset()
            self.hub.datasets[name].commit({".gitattributes": b""})
            self.json({"url": f"{self.hub.endpoint}/datasets/{name}", "name": name})

    def _info(self, name: str, revision: str | None) -> None:
        if (dataset := self._readable(name)) is not None:
            sha = dataset.head if revision in (None, "main") else revision
            self.json({"id": name, "sha": sha, "private": dataset.private, "siblings": []})

    def _is_large(self, path: str) -> bool:
        return path.endswith(self.hub.large) if self.hub.large else False

    def _tree(self, name: str, revision: str, query: dict[str, list[str]]) -> None:
        dataset = self._readable(name)
        if dataset is None:
            return
        tree = dataset.tree(revision)
        if tree is None:
            self.error(404, "RevisionNotFound")
            return
        start, size = int(query.get("cursor", ["0"])[0]), 1000
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": git_hash(data)}
            | ({"lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 130}} if self._is_large(path) else {})
            for path, data in sorted(tree.items())
        ]
        headers = {"Content_Type": "application/json"}
        if start + size < len(entries):
            base = f"{self.hub.endpoint}{urlsplit(self.path).path}"
            headers["Link"] = f'<{base}?recursive=true&expand=false&cursor={start + size}>; rel="next"'
        self.send(json.dumps(entries[start : start + size]).encode(), **headers)

    def _preupload(self, name: str, revision: str) -> None:
        dataset = self._readable(name)
        if dataset is None or not self._writable():
            return
        tree = dataset.tree(revision) or {}
        self.json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if self._is_large(file["path"]) else "regular",
                        "shouldIgnore": False,
                        "oid": git_hash(tree[file["path"]]) if file["path"] in tree else None,
                    }
                    for file in json.loads(self.body)["files"]
                ]
            }
        )

    def _batch(self, name: str) -> None:
        objects = [
            {"oid": item["oid"], "size": item["size"]}
            | {"actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{item['oid']}"}}}
            for item in json.loads(self.body)["objects"]
        ]
        self.json({"transfer": "basic", "objects": objects})

    def _upload(self, oid: str) -> None:
        if self.hub.fault(self, oid):
            return
        self.hub.objects[oid] = self.body
        self.send(b"")

    def _commit(self, name: str, revision: str) -> None:
        dataset = self._readable(name)
        if dataset is None or not self._writable() or self.hub.on_commit(self):
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        with self.hub.lock:
            tree = dict(dataset.commits[-1][1])
            for line in lines:
                value = line["value"]
                if line["key"] == "header" and value.get("parentCommit", dataset.head) != dataset.head:
                    self.json({"error": "A commit has happened since. Please refresh and try again."}, 412)
                    return
                if line["key"] == "file":
                    tree[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    tree[value["path"]] = self.hub.objects[value["oid"]]
                elif line["key"] == "deletedFile":
                    tree.pop(value["path"])
            oid = dataset.commit(tree)
        if not self.hub.after_commit(self):
            self.json(
                {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.endpoint}/datasets/{name}/commit/{oid}"}
            )

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if self.hub.fault(self, path):
            return
        dataset = self._readable(name)
        if dataset is None:
            return
        tree = dataset.tree(revision)
        if tree is None or path not in tree:
            self.error(404, "RevisionNotFound" if tree is None else "EntryNotFound")
            return
        data = tree[path]
        commit = dataset.head if revision == "main" else revision
        if self._is_large(path):
            self.hub.objects[sha256(data)] = data
            linked = {"X_Linked_Etag": f'"{sha256(data)}"', "X_Linked_Size": str(len(data)), "X_Repo_Commit": commit}
            self.send(b"", 302, Location=f"{self.hub.cdn}/{sha256(data)}", **linked)
            return
        headers = {"X_Repo_Commit": commit, "ETag": f'"{git_hash(data)}"', "Content_Type": "image/svg+xml"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and int(asked[1]) < len(data):
            headers["Content_Range"] = f"bytes {asked[1]}-{len(data) - 1}/{len(data)}"
            self.send(data[int(asked[1]) :], 206, **headers)
        elif asked:
            self.error(416)
        else:
            self.send(data, **headers)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def random_images(count: int, size: int) -> dict[str, bytes]:
    """Files of random bytes, the same each time, under the names of figures."""
    draw = random.Random(count)
    return {f"figures/f{i:03d}-wide-light.svg": draw.randbytes(size) for i in range(count)}


def published(hub: Hub, images: dict[str, bytes], repo: str = "owner/images") -> Lock:
    """Puts images into a dataset and returns the lock that names them."""
    commit = hub.datasets.setdefault(repo, Dataset()).commit(images)
    files = {
        path: LockedFile(
            path, sha256(data), len(data), 720, 400, "What it shows.", "Apache-2.0", "guide_code.figures.x"
        )
        for path, data in images.items()
    }
    return Lock(repo, commit, files)


if __name__ == "__main__":
    with Hub() as hub:
        hub.datasets["owner/images"] = Dataset()
        commit = hub.datasets["owner/images"].commit(random_images(int(sys.argv[1]), int(sys.argv[2])))
        print(hub.endpoint, commit, flush=True)
        sys.stdin.read()  # until the parent closes it
