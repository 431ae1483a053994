"""Files in whole or not at all, also when a process is killed while it writes one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from etils import epath

from layerkit_runner.whole_files import write_whole

# Writes a large file over and over; each content is one letter, repeated.
WRITER = """
import itertools, sys
from etils import epath
from layerkit_runner.whole_files import write_whole
for letter in itertools.cycle("ab"):
    write_whole(epath.Path(sys.argv[1]), letter * 2_000_000)
"""


def test_makes_the_folder_and_replaces(tmp_path: Path):
    path = epath.Path(tmp_path) / "new" / "file.txt"
    write_whole(path, "one")
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_a_killed_writer_leaves_one_content_or_the_other(tmp_path: Path):
    path = tmp_path / "file.txt"
    for attempt in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.03 * attempt)
        process.kill()
        process.wait()
        content = path.read_text()
        assert content in ("a" * 2_000_000, "b" * 2_000_000)
        path.unlink()
