"""Full disks and read-only folders: an error of one sentence, and the checkpoint before is intact.

The disks are real: small file systems in memory, mounted where only one process sees them.
"""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from layerkit_runner.checkpointing import (
    CheckpointManager,
    CheckpointPolicy,
    SaveError,
    SaveTimeoutError,
    StateFormat,
)
from layerkit_runner.checkpointing.errors import save_error

EVERY_STEP = CheckpointPolicy(save_interval_steps=1, max_to_keep=None, keep_interval=None)
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


@pytest.mark.slow  # a failed save is below
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


def test_time_out_of_the_file_system_does_not_blame_the_limit_of_the_save():
    error = OSError(errno.ETIMEDOUT, "Connection timed out")
    assert isinstance(error, TimeoutError)
    result = save_error(error, step=2, directory="job", newest=1, timeout_secs=600)
    assert not isinstance(result, SaveTimeoutError)
    assert "Connection timed out" in str(result) and "async_timeout_secs" not in str(result)


@pytest.mark.parametrize("call", ["save", "should_save"])
def test_error_of_a_failed_save_is_raised_once_by_the_next_call(tmp_path, call):
    def save(step: int, size: int) -> bool:
        state = {"w": jnp.ones(size)}
        return manager.save(step, state, input_states={}, metadata={}, force=True)

    def next_call() -> None:
        if call == "save":
            save(3, 4)
            return
        # A training loop asks `should_save` at every step, and saves seldom.
        for step in range(3, 5000):
            assert not manager.should_save(step)
            time.sleep(0.01)

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointManager(tmp_path, state_format=StateFormat.MSGPACK) as manager:
        save(1, 4)
        manager.wait_until_finished()
        try:  # a disk on which no large file fits
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, unlimited[1]))
            assert save(2, 2**20)  # 4 MiB
            with pytest.raises(SaveError, match="step 2 could not be written .* File too large"):
                next_call()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert manager.latest_step() == 1
        assert save(2, 2**20)
    with CheckpointManager(tmp_path) as manager:
        assert manager.newest_sound_step() == 2


def test_a_state_that_cannot_be_read_is_raised_and_no_save_is_awaited(tmp_path: Path):
    with CheckpointManager(tmp_path, policy=EVERY_STEP) as manager:
        state = {"w": jnp.ones(4)}
        state["w"].delete()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="deleted"):
            manager.save(1, state, input_states={}, metadata={})
        manager.wait_until_finished()
        assert time.monotonic() - began < 60  # of a time limit of 600
        assert manager.save(1, {"w": jnp.ones(4)}, input_states={}, metadata={})
    assert manager.latest_step() == 1
