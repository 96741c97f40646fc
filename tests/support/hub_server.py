"""A stand-in for the model hub on this machine: folders as revisions of repositories, told as huggingface_hub asks."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


def sha(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub:
    """`repositories` maps an id to its branches, each a folder; one without branches is gated.

    `asked` are the paths that were asked for; `fails` is "" or how it fails: "silent" or with a status such as "503".
    """

    def __init__(self, repositories: dict[str, dict[str, Path]]) -> None:
        self.repositories = repositories
        self.requested_paths: list[str] = []
        self.fails = ""
        self.endpoint = ""

    def commit(self, repository: str, branch: str) -> str:
        folder = self.repositories[repository][branch]
        return sha(b"".join(name.encode() + (folder / name).read_bytes() for name in self.files(folder)))

    @staticmethod
    def files(folder: Path) -> list[str]:
        return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())

    def accept(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a POST: a repository is created, or files are uploaded in one commit."""
        self.requested_paths.append(path)
        if self.fails:
            return self._refusal(int(self.fails), "Failing")
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            repository = f"{json.loads(body).get('organization') or 'lab'}/{name}"
            return self._json({"url": f"{self.endpoint}/datasets/{repository}"})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        parts = [unquote(part) for part in path.strip("/").split("/")]
        repository, action, branch = "/".join(parts[2:4]), parts[4], parts[5]
        if repository not in self.repositories:
            return self._refusal(401, "RepoNotFound")
        if action == "preupload":
            paths = [entry["path"] for entry in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in paths]
            return self._json({"files": modes})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                file = self.repositories[repository][branch] / line["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(line["value"]["content"]))
        commit = self.commit(repository, branch)
        return self._json(
            {
                "success": True,
                "commitOid": commit,
                "commitUrl": f"{self.endpoint}/datasets/{repository}/commit/{commit}",
            }
        )

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        self.requested_paths.append(path)
        parts = [unquote(part) for part in path.strip("/").split("/")]
        of_api = parts[:1] == ["api"]
        if parts[0] == "datasets":
            parts = parts[1:]
        repository, path_parts = "/".join((parts[2:] if of_api else parts)[:2]), (parts[2:] if of_api else parts)[2:]
        branches = self.repositories.get(repository)
        if self.fails:
            return self._refusal(int(self.fails), "Failing")
        if branches is None:
            return self._refusal(401, "RepoNotFound")
        if not branches:
            return self._refusal(403, "GatedRepo")
        if path_parts == ["refs"]:
            heads = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": self.commit(repository, name)}
                for name in branches
            ]
            return self._json({"branches": heads, "tags": [], "converts": []})
        revision = path_parts[1] if len(path_parts) > 1 else "main"
        branch = next(
            (
                branch_name
                for branch_name in branches
                if revision in (branch_name, self.commit(repository, branch_name))
            ),
            None,
        )
        if branch is None:
            return self._refusal(404, "RevisionNotFound")
        commit, folder = self.commit(repository, branch), branches[branch]
        if path_parts[:1] == ["resolve"]:
            file = folder / "/".join(path_parts[2:])
            if not file.is_file():
                return self._refusal(404, "EntryNotFound")
            content = file.read_bytes()
            return 200, {"ETag": f'"{sha(content)}"', "X-Repo-Commit": commit}, content
        if path_parts[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": sha(content)}
                for name in self.files(folder)
                for content in [(folder / name).read_bytes()]
            ]
            return self._json(entries)
        siblings = [{"rfilename": name} for name in self.files(folder)]
        return self._json({"id": repository, "sha": commit, "siblings": siblings})

    @staticmethod
    def _json(value: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    @staticmethod
    def _refusal(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
        return status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"}, b"{}"

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        """Answer on a free port of the loopback, `endpoint`."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if hub.fails == "silent":
                    self.close_connection = True
                    return
                status, headers, body = hub.answer(urlsplit(self.path).path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers, content = hub.accept(urlsplit(self.path).path, body)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.endpoint = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield self
            server.shutdown()
