"""The same contract on a store that is not the local disk.

A file system in memory, by fsspec, takes the place of the one behind `s3://`, so every access
goes through epath as it would to a real store. TensorStore has drivers of its own and cannot see
it: here the state is one msgpack file, and all else is the same code.
"""

from __future__ import annotations

import threading

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from layerkit_runner.checkpointing import (
    CheckpointManager,
    CheckpointPolicy,
    SaveTimeoutError,
    StateFormat,
)


class MemoryStore(MemoryFileSystem):
    """Keeps `s3://bucket/…` in memory, apart from fsspec's own `memory://`.

    Writing the file `hangs_at` waits until it is let go.
    """

    protocol = "s3"
    store: dict = {}
    pseudo_dirs = [""]
    let_go = threading.Event()
    hangs_at: str | None = None

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("s3:/"))

    def _open(self, path, mode="rb", **options):
        if "w" in mode and self.hangs_at is not None and path.endswith(self.hangs_at):
            self.let_go.wait()
        return super()._open(path, mode, **options)


@pytest.fixture
def bucket(monkeypatch) -> epath.Path:
    fsspec.register_implementation("s3", MemoryStore, clobber=True)
    monkeypatch.setattr("etils.epath.gpath._is_tf_installed", lambda: False)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    MemoryStore.let_go.clear()
    MemoryStore.store.clear()
    MemoryStore.pseudo_dirs[:] = [""]
    folder = epath.Path("s3://bucket/job")
    folder.mkdir(parents=True)
    yield folder
    MemoryStore.let_go.set()
    MemoryStore.store.clear()
    epath.backend.fsspec_backend._get_filesystem.cache_clear()


def test_saving_keeping_damage_and_restoring_on_a_remote_store(bucket):
    directory = bucket / "checkpoints"
    policy = CheckpointPolicy(save_interval_steps=1, max_to_keep=2, keep_interval=None)
    lines: list[str] = []

    def open_manager() -> CheckpointManager:
        return CheckpointManager(
            directory, policy=policy, state_format=StateFormat.MSGPACK, report=lines.append
        )

    with open_manager() as manager:
        for step in (1, 2, 3):
            state = {"w": jnp.full(8, float(step))}
            manager.save(step, state, input_states={"train": {"at": step}}, metadata={})
    assert sorted(path.name for path in directory.iterdir()) == [
        "checkpoint_00000002",
        "checkpoint_00000003",
    ]

    file = directory / "checkpoint_00000003" / "state" / "state.msgpack"
    file.write_bytes(file.read_bytes()[:-1])
    (directory / "checkpoint_00000004.orbax-checkpoint-tmp").mkdir()
    (directory / "checkpoint_00000004.orbax-checkpoint-tmp" / "part").write_bytes(b"x")
    with open_manager() as manager:
        assert manager.newest_sound_step() == 2
        target = jax.ShapeDtypeStruct(
            (8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        restored = manager.restore(2, {"w": target})
        assert manager.save(3, restored.state, input_states={}, metadata={})
        manager.wait_until_finished()
        assert manager.newest_sound_step() == 3
    np.testing.assert_array_equal(restored.state["w"], 2.0)
    assert restored.input_states == {"train": {"at": 2}}
    assert lines[0].startswith("Deleted the unfinished checkpoint s3://bucket/job/checkpoints/")
    assert "state/state.msgpack: short" in lines[1]
    assert (directory / "damaged_checkpoint_00000003" / "state" / "state.msgpack").exists()


@pytest.mark.parametrize(
    "name", ["state.msgpack", pytest.param("manifest.json", marks=pytest.mark.slow)]
)
def test_a_save_that_hangs_is_named(bucket, monkeypatch: pytest.MonkeyPatch, name: str):
    # A folder of its own, since the save goes on when the fixture lets it go.
    manager = CheckpointManager(
        bucket / name, state_format=StateFormat.MSGPACK, async_timeout_secs=1
    )

    def save(step: int) -> None:
        manager.save(step, {"w": jnp.ones(4)}, input_states={}, metadata={}, force=True)

    save(1)
    manager.wait_until_finished()
    monkeypatch.setattr(MemoryStore, "hangs_at", name)
    save(2)
    with pytest.raises(SaveTimeoutError, match=r"step 2 .* --async_timeout_secs=1\..* step 1"):
        manager.wait_until_finished()
