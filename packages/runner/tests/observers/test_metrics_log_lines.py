from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
import uuid

import fsspec
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from layerkit_runner.observers import metrics_log


class Bucket(MemoryFileSystem):
    """A store with az:// addresses and no append, held in memory."""

    protocol = ("az",)
    store = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("az://"))

    def _open(self, path, mode="rb", **kwargs):
        if "a" in mode or "+" in mode:
            raise NotImplementedError("this store cannot append")
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def remote_dir():
    if importlib.util.find_spec("tensorflow") is not None:
        pytest.skip("with TensorFlow installed, epath does not go through fsspec")
    fsspec.register_implementation("az", Bucket, clobber=True)
    return epath.Path(f"az://bucket/{uuid.uuid4().hex}")


def lines_of(path):
    return path.read_text().splitlines()


def wait_for(path, lines):
    deadline = time.monotonic() + 20
    while not (path.exists() and lines_of(path) == lines):
        assert time.monotonic() < deadline, f"{path} never held {lines}"
        time.sleep(0.01)


def test_encode_returns_strict_and_exact_json():
    numbers = {"loss": np.float32(0.1), "bad": math.nan, "high": math.inf, "low": -math.inf}
    line = metrics_log.encode({"step": 3, **numbers, "name": "é\n", "none": None})
    assert "\n" not in line

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert np.float32(record["loss"]) == np.float32(0.1)
    assert [record[k] for k in ("bad", "high", "low")] == ["NaN", "Infinity", "-Infinity"]
    assert (record["name"], record["step"], record["none"]) == ("é\n", 3, None)


@pytest.mark.parametrize("kind", [metrics_log.LocalLines, metrics_log.StoredLines])
def test_lines_are_kept_by_the_next_writer(request, tmp_path, kind):
    is_local = kind is metrics_log.LocalLines
    folder = epath.Path(tmp_path) if is_local else request.getfixturevalue("remote_dir")
    path = folder / "new" / "lines.jsonl"
    first = metrics_log.open_lines(path)
    assert isinstance(first, kind)
    first.write("0")
    if is_local:
        assert lines_of(path) == ["0"]  # at once
    first.write("1")
    first.close()
    assert lines_of(path) == ["0", "1"]
    second = metrics_log.open_lines(path)
    second.write("2")
    second.close()
    assert (first.resumed, second.resumed) == (False, True)
    assert lines_of(path) == ["0", "1", "2"]


def test_incomplete_last_line_is_removed_before_appending(tmp_path):
    path = epath.Path(tmp_path) / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = metrics_log.open_lines(path)
    writer.write('{"step": 2}')
    writer.close()
    assert lines_of(path) == ['{"step": 1}', '{"step": 2}']


def test_written_lines_survive_sigkill(tmp_path):
    path = tmp_path / "lines.jsonl"
    code = (
        "import os, signal; from layerkit_runner.observers import metrics_log;"
        f"w = metrics_log.open_lines({os.fspath(path)!r}); [w.write(str(i)) for i in range(50)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert killed.returncode == -9
    assert path.read_text().splitlines() == [str(i) for i in range(50)]


def test_remote_lines_wait_for_the_interval_or_a_flush(remote_dir):
    path = remote_dir / "lines.jsonl"
    remote_dir.mkdir()
    writer = metrics_log.StoredLines(path, interval=3600)
    writer.write("first")  # at once: the interval counts from here
    wait_for(path, ["first"])
    writer.write("second")
    assert lines_of(path) == ["first"]
    writer.flush()
    wait_for(path, ["first", "second"])
    writer.close()


def test_close_raises_the_error_of_a_rewrite(remote_dir, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("no write access to the bucket")

    writer = metrics_log.StoredLines(remote_dir / "lines.jsonl")
    monkeypatch.setattr(Bucket, "_open", refuse)
    writer.write("lost")
    with pytest.raises(PermissionError, match="no write access"):
        writer.close()
