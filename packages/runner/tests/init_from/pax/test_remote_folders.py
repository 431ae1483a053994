"""Checkpoints of Paxml in a store of Google Cloud, which a small server plays.

TensorStore asks the server, and epath reads through fsspec.
"""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

from layerkit_runner.checkpointing.folders import COMMIT_FILE
from layerkit_runner.init_from.pax.paxml_folders import find, open_arrays

fsspec = pytest.importorskip("fsspec")


class Store(http.server.BaseHTTPRequestHandler):
    """The files of a folder as the objects of a bucket: lists and reads of Google's JSON API."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, *args: Any):
        self.folder = folder
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        _, _, quoted = url.path.partition("/o/")
        if quoted:
            path = self.folder / urllib.parse.unquote(quoted)
            self.reply(path.read_bytes() if path.is_file() else None)
            return
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = sorted(str(path.relative_to(self.folder)) for path in files)
        result = [
            {"name": name, "size": "0", "generation": "1"}
            for name in names
            if name.startswith(query.get("prefix", "")) and name >= query.get("startOffset", "")
        ]
        self.reply(json.dumps({"items": result}).encode())

    def reply(self, body: bytes | None) -> None:
        status, headers = (404 if body is None else 200), {"x-goog-generation": "1"}
        body = body or b""
        if "Range" in self.headers and status == 200:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            size = len(body)
            start = int(first) if first else size - int(last)
            stop = min(int(last) + 1, size) if first and last else size
            status, body = 206, body[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the objects of `gs://bucket`."""
    from fsspec.implementations.local import LocalFileSystem

    class Files(LocalFileSystem):
        protocol = ("gs", "gcs")

        def __init__(self, *args: Any, finalize_on_close: bool = False, **kwargs: Any):
            super().__init__(*args, **kwargs)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(path).replace("gs://bucket", str(tmp_path), 1).rstrip("/")

    fsspec.register_implementation("gcs", Files, clobber=True)
    server = http.server.ThreadingHTTPServer(("localhost", 0), partial(Store, tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://localhost:{server.server_port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    yield tmp_path
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_checkpoints_of_each_format_are_read_from_a_store(pax: Any, bucket: Path):
    for case in ("unstacked_flax", "stacked_zarr", "stacked_ocdbt"):
        shutil.copytree(pax.folder / case, bucket / case)
        remote = epath.Path(f"gs://bucket/{case}")
        # A step without Orbax's file is not committed.
        assert find(remote) is None
        for step_folder in (bucket / case / "checkpoints").iterdir():
            (step_folder / COMMIT_FILE).touch()
        step, step_folder = find(remote).choose(None)
        assert step == pax.step
        arrays = open_arrays(step_folder)
        assert len(arrays.specs) > 20
        for name in list(arrays.specs)[::8]:
            read = arrays.read(name, arrays.by_name[name])
            np.testing.assert_array_equal(read, pax.array(case, name))
