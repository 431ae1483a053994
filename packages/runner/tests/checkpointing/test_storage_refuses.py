"""A full disk, a read-only folder and a store that hangs: each is named in one sentence, and the
checkpoint before stays intact.

The disks are real: small file systems in memory, mounted where only one process sees them.
"""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import jax.numpy as jnp
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from layerkit_runner.checkpointing import (
    CheckpointManager,
    CheckpointPolicy,
    SaveError,
    SaveTimeoutError,
    StateFormat,
)
from layerkit_runner.checkpointing.errors import save_error

PROGRAM = """
import json, os, subprocess, sys
import jax.numpy as jnp
import numpy as np
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.checkpointing import SaveError, StateFormat

directory = sys.argv[1]
policy = CheckpointPolicy(save_interval_steps=1, max_to_keep=None, keep_interval=None)
numbers = np.random.default_rng(0).standard_normal(2**18)  # 1 MiB that cannot be compressed
state = {"w": jnp.asarray(numbers, jnp.float32)}
told = []

def save(manager, step):
    try:
        manager.save(step, state, input_states={}, metadata={})
        manager.wait_until_finished()
        told.append("saved")
    except SaveError as error:
        told.append(str(error))

for state_format in StateFormat:
    folder = f"{directory}/{state_format.value}"
    with CheckpointManager(folder, policy=policy, state_format=state_format) as manager:
        save(manager, 1)
        with open(f"{directory}/filler", "wb") as filler:
            free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_bsize
            filler.write(b"x" * (free - 2**19))
        save(manager, 2)
        assert manager.newest_sound_step() == 1
        os.remove(f"{directory}/filler")
        save(manager, 2)
        assert manager.newest_sound_step() == 2

with CheckpointManager(f"{directory}/tensorstore", policy=policy) as manager:
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    save(manager, 3)
    assert manager.newest_sound_step() == 2
print(json.dumps(told))
"""


def has_own_mounts() -> bool:
    command = ["unshare", "--map-root-user", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not has_own_mounts(), reason="this user may not mount a file system of its own")
def test_a_full_disk_and_a_read_only_folder(tmp_path: Path):
    mounted = 'mount -t tmpfs -o size=16m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    shell = ["sh", "-c", mounted, "sh", str(tmp_path), sys.executable, PROGRAM]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", *shell],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "/orbax/checkpoint/" not in done.stderr  # no tracebacks: the sentences below say it all
    told = json.loads(done.stdout.splitlines()[-1])
    assert [told[at] for at in (0, 2, 3, 5)] == ["saved"] * 4
    full = [told[1], told[4]]
    for text, state_format in zip(full, StateFormat, strict=True):
        assert text.startswith(
            f"The checkpoint of step 2 could not be written to {tmp_path}/{state_format.value}: "
        )
        assert "No space left on device" in text
        assert text.endswith("The newest checkpoint there: step 1.")
    assert told[6].startswith(
        f"The checkpoint of step 3 could not be written to {tmp_path}/tensorstore: "
    )
    assert "Read-only file system" in told[6]
    assert all("\n" not in text for text in told)


class HangingStore(MemoryFileSystem):
    """Keeps `s3://bucket/…` in memory; writing a file of one name waits until it is let go."""

    protocol = "s3"
    store: dict = {}
    pseudo_dirs = [""]
    let_go = threading.Event()
    hangs_at = "state.msgpack"

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("s3:/"))

    def _open(self, path, mode="rb", **options):
        if "w" in mode and path.endswith(self.hangs_at):
            self.let_go.wait()
        return super()._open(path, mode, **options)


@pytest.fixture
def bucket(monkeypatch):
    fsspec.register_implementation("s3", HangingStore, clobber=True)
    monkeypatch.setattr("etils.epath.gpath._is_tf_installed", lambda: False)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    HangingStore.store.clear()
    HangingStore.pseudo_dirs[:] = [""]
    folder = epath.Path("s3://bucket/job")
    folder.mkdir(parents=True)
    yield folder
    HangingStore.let_go.set()
    HangingStore.store.clear()
    epath.backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.mark.parametrize("name", ["state.msgpack", "manifest.json"])
def test_a_save_that_hangs_is_named(bucket, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(HangingStore, "hangs_at", name)
    policy = CheckpointPolicy(save_interval_steps=1)
    manager = CheckpointManager(
        bucket, policy=policy, state_format=StateFormat.MSGPACK, async_timeout_secs=1
    )
    HangingStore.let_go.set()
    manager.save(1, {"w": jnp.ones(4)}, input_states={}, metadata={})
    manager.wait_until_finished()
    HangingStore.let_go.clear()
    assert manager.save(2, {"w": jnp.ones(4)}, input_states={}, metadata={})
    with pytest.raises(SaveTimeoutError, match=r"step 2 .* --async_timeout_secs=1\..* step 1"):
        manager.wait_until_finished()


def test_time_out_of_the_file_system_does_not_blame_the_limit_of_the_save():
    error = OSError(errno.ETIMEDOUT, "Connection timed out")
    assert isinstance(error, TimeoutError)
    found = save_error(error, step=2, directory="job", newest=1, timeout_secs=600)
    assert not isinstance(found, SaveTimeoutError)
    assert "Connection timed out" in str(found) and "async_timeout_secs" not in str(found)


def test_failed_save_is_reported_at_the_next_step(tmp_path):
    """A training loop asks `should_save` at every step, and saves seldom."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    manager = CheckpointManager(tmp_path, state_format=StateFormat.MSGPACK)

    def steps_without_a_save():
        for step in range(6, 5000):
            assert not manager.should_save(step)
            time.sleep(0.01)

    try:  # a disk on which no large file fits
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, unlimited[1]))
        state = {"w": jnp.ones(2**20)}  # 4 MiB
        manager.save(5, state, input_states={}, metadata={}, force=True)
        with pytest.raises(SaveError, match="step 5 could not be written .* File too large"):
            steps_without_a_save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    manager.close()
    assert manager.latest_step() is None
