"""The checkpoint manager, on real files and eight simulated devices."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xxhash
from etils import epath
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from layerkit_runner.checkpointing import (
    CheckpointManager,
    CheckpointPolicy,
    DamagedCheckpointError,
    LayoutVersionError,
    StateFormat,
    StructureMismatchError,
    integrity,
    stored_state,
)
from layerkit_runner.checkpointing.folders import committed_steps
from layerkit_runner.errors import NonFiniteError

EVERY_STEP = CheckpointPolicy(save_interval_steps=1, max_to_keep=None, keep_interval=None)
BOTH_FORMATS = pytest.mark.parametrize("state_format", list(StateFormat))


def mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("data", "fsdp", "tensor")[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def numbers(offset: float = 0.0):
    """A training state with nested optimizer tuples, empty nodes, scalars and a low precision."""
    params = {
        "embed": jnp.arange(64.0).reshape(8, 8) + offset,
        "scale": jnp.full(8, 1.5 + offset, jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    gradients = jax.tree.map(lambda x: 0.25 * x, params)
    _, opt_state = optimizer.update(gradients, optimizer.init(params), params)
    return {"step": jnp.int32(7), "params": params, "opt_state": opt_state, "unused": None}


def place(state, sharding_of):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding_of(leaf)), state)


def target_of(state, sharding_of):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf)), state
    )


def split_matrices(over: jax.sharding.Mesh, *axes):
    """Shards matrices by the axes and replicates the rest."""
    return lambda leaf: NamedSharding(over, P(*axes) if leaf.ndim == 2 else P())


def everywhere(leaf=None) -> NamedSharding:
    return NamedSharding(mesh(8), P())


def save(directory, *steps: int, state_format=StateFormat.TENSORSTORE, state=None):
    state = place(numbers(), everywhere) if state is None else state
    with CheckpointManager(directory, policy=EVERY_STEP, state_format=state_format) as manager:
        for step in steps:
            manager.save(
                step,
                state,
                input_states={"train": {"scope": "global", "position": 10 * step}},
                metadata={"note": f"at {step}"},
            )


def assert_same_bits(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for result, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert result.dtype == expected.dtype
        assert np.asarray(result).tobytes() == np.asarray(expected).tobytes()


def largest_file(folder: Path) -> Path:
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_value(state, part: str, value: float):
    """Puts a value into one entry of the first array of a part."""
    leaves, stored_state = jax.tree.flatten(state[part])
    first = next(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact))
    changed = leaves[first].reshape(-1).at[-1].set(value).reshape(leaves[first].shape)
    leaves[first] = jax.device_put(changed, leaves[first].sharding)
    return {**state, part: jax.tree.unflatten(stored_state, leaves)}


@BOTH_FORMATS
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_weights_are_not_committed_and_older_steps_stay(
    tmp_path, state_format, value, raises
):
    shardings = {
        StateFormat.MSGPACK: everywhere,
        StateFormat.TENSORSTORE: split_matrices(mesh(2, 2, 2), ("data", "fsdp"), "tensor"),
    }
    state = place(numbers(), shardings[state_format])
    policy = CheckpointPolicy(save_interval_steps=1, max_to_keep=1, keep_interval=None)
    with CheckpointManager(tmp_path, policy=policy, state_format=state_format) as manager:
        manager.save(1, state, input_states={}, metadata={})
        bad = with_value(state, "params", value)
        assert manager.save(2, bad, input_states={}, metadata={}, force=True)
        with raises(NonFiniteError, exit_code=65):
            manager.should_save(3)
        # The manager can be used on.
        assert manager.latest_step() == 1
        assert manager.save(3, state, input_states={}, metadata={}, force=True)
        manager.wait_until_finished()
        assert committed_steps(epath.Path(tmp_path)) == [3]


@pytest.mark.parametrize(("value", "is_saved"), [(np.nan, False), (np.inf, True)])
def test_optimizer_state_may_hold_infinity_but_no_nan(tmp_path, value, is_saved):
    """The error of the last save is raised when the manager is closed."""
    state = with_value(place(numbers(), everywhere), "opt_state", value)
    error = contextlib.nullcontext() if is_saved else pytest.raises(NonFiniteError)
    with error, CheckpointManager(tmp_path, policy=EVERY_STEP) as manager:
        manager.save(1, state, input_states={}, metadata={})
    assert committed_steps(epath.Path(tmp_path)) == [1] * is_saved


def test_finite_check_runs_before_a_step_that_takes_over_the_arrays():
    step = jax.jit(lambda x: jnp.nan_to_num(x) + 1, donate_argnums=0)
    weight = jnp.ones((64, 2**17)).at[-1, -1].set(jnp.nan)
    check = stored_state.FiniteCheck({("w",): weight})
    step(weight)
    assert weight.is_deleted()
    assert check.nonfinite() == [("w",)]


TARGETS = {
    "replicated": lambda: everywhere,
    "over data": lambda: split_matrices(mesh(8), "data"),
    "over all of 2x2x2": lambda: split_matrices(mesh(2, 2, 2), ("data", "fsdp"), "tensor"),
    "two devices": lambda: split_matrices(mesh(2), None, "data"),
    "one device": lambda: lambda leaf: jax.sharding.SingleDeviceSharding(jax.devices()[3]),
}


@pytest.fixture(scope="module", params=["msgpack", "tensorstore replicated", "tensorstore sharded"])
def written(request, tmp_path_factory):
    """A folder with step 5, in one of the ways in which a state can be stored."""
    directory = tmp_path_factory.mktemp("written")
    is_sharded = request.param.endswith("sharded")
    sharding = split_matrices(mesh(4, 2), "data", "fsdp") if is_sharded else everywhere
    state_format = StateFormat(request.param.split()[0])
    save(directory, 5, state_format=state_format, state=place(numbers(), sharding))
    return directory


@pytest.mark.parametrize("sharding", TARGETS)
def test_either_format_restores_bit_for_bit_onto_any_mesh(written, sharding):
    directory = written
    state = numbers()
    target = target_of(state, TARGETS[sharding]())
    with CheckpointManager(directory, read_only=True) as manager:
        restored = manager.restore(5, target)
    assert_same_bits(restored.state, state)
    for result, required in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(target), strict=True
    ):
        assert result.sharding == required.sharding
    assert restored.input_states == {"train": {"scope": "global", "position": 50}}
    assert restored.metadata == {"note": "at 5"}


def test_restore_of_another_structure_lists_the_differences(written):
    directory = written
    target = target_of(numbers(), everywhere)
    target["params"]["embeds"] = target["params"].pop("embed")
    target["params"]["scale"] = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=everywhere())
    target["step"] = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=everywhere())
    with CheckpointManager(directory) as manager, pytest.raises(StructureMismatchError) as error:
        manager.restore(5, target)
    assert [line.split(":")[0] for line in error.value.differences] == [
        "params/embed",
        "params/embeds",
        "params/scale",
        "step",
    ]


def test_read_only_manager_changes_nothing(written):
    directory = written
    (directory / "checkpoint_00000009.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    before = contents(directory)
    lines: list[str] = []
    with CheckpointManager(directory, read_only=True, report=lines.append) as manager:
        assert manager.newest_sound_step() == manager.latest_step() == 5
        manager.restore(5, target_of(numbers(), everywhere))
        assert not manager.should_save(5000)
        with pytest.raises(PermissionError, match="read-only.* step 6"):
            manager.save(6, numbers(), input_states={}, metadata={})
    assert contents(directory) == before
    assert (directory / "checkpoint_00000009.orbax-checkpoint-tmp").exists()
    assert lines == []


@pytest.mark.parametrize(
    ("state_format", "sharding"),
    [
        *itertools.product(StateFormat, ("replicated", "one device")),
        (StateFormat.TENSORSTORE, "over data"),
    ],
)
def test_state_may_be_donated_when_save_returns(tmp_path, state_format, sharding):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = place({"w": jnp.ones((8, 2**17))}, TARGETS[sharding]())["w"]
    with CheckpointManager(tmp_path, policy=EVERY_STEP, state_format=state_format) as manager:
        manager.save(1, {"w": state}, input_states={}, metadata={})
        for _ in range(5):
            state = step(state)
        restored = manager.restore(1, target_of({"w": state}, everywhere))
    np.testing.assert_array_equal(restored.state["w"], 1.0)
    np.testing.assert_array_equal(state, 6.0)


def test_step_is_saved_if_due_or_forced_and_never_twice(tmp_path):
    policy = CheckpointPolicy(save_interval_steps=10)
    state = {"w": jnp.ones(4)}
    with CheckpointManager(tmp_path, policy=policy) as manager:

        def saved(step, **options):
            return manager.save(step, state, input_states={}, metadata={}, **options)

        assert [step for step in range(12) if saved(step)] == [10]
        assert saved(13, force=True)
        assert not saved(13, force=True)
        assert not saved(10, force=True)
        assert saved(20)
    with CheckpointManager(tmp_path, policy=policy) as manager:
        assert not manager.should_save(20)
        assert not manager.save(20, state, input_states={}, metadata={}, force=True)
        assert manager.should_save(30)


def test_steps_that_are_no_longer_kept_are_moved_into_a_folder(tmp_path):
    policy = CheckpointPolicy(save_interval_steps=1, max_to_keep=2, keep_interval=None)
    state = {"w": jnp.ones(4)}
    with CheckpointManager(tmp_path, policy=policy, todelete_subdir="archive") as manager:
        for step in range(1, 5):
            manager.save(step, state, input_states={}, metadata={})
    assert committed_steps(epath.Path(tmp_path)) == [3, 4]
    assert committed_steps(epath.Path(tmp_path) / "archive") == [1, 2]
    target = target_of(state, everywhere)
    with CheckpointManager(tmp_path / "archive", read_only=True) as archive:
        np.testing.assert_array_equal(archive.restore(2, target).state["w"], np.ones(4))


def test_relative_folder_without_checkpoints_has_no_step_until_the_first_save(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("runs/checkpoints") as manager:
        assert manager.latest_step() is None
        assert manager.newest_sound_step() is None
        with pytest.raises(FileNotFoundError, match="step 3"):
            manager.restore(3, {})
        manager.save(1, {"w": jnp.ones(2)}, input_states={}, metadata={}, force=True)
    assert (tmp_path / "runs/checkpoints/checkpoint_00000001").exists()


DAMAGE = {
    "flipped": lambda path: path.write_bytes(
        path.read_bytes()[:-3] + bytes([path.read_bytes()[-3] ^ 4]) + path.read_bytes()[-2:]
    ),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


@BOTH_FORMATS
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_step_is_reported_and_moved_aside(tmp_path, state_format, damage):
    state = place(numbers(), everywhere)
    save(tmp_path, 10, 25, state_format=state_format, state=state)
    file = largest_file(tmp_path / "checkpoint_00000025" / "state")
    intact = file.read_bytes()
    DAMAGE[damage](file)

    lines: list[str] = []
    with CheckpointManager(tmp_path, policy=EVERY_STEP, report=lines.append) as manager:
        assert manager.latest_step() == 25
        restored = manager.restore_newest(target_of(state, everywhere))
        assert restored.step == manager.latest_step() == 10
        assert_same_bits(restored.state, state)
        assert restored.input_states["train"]["position"] == 100
        # Training resumes from step 10 and saves step 25 again.
        assert manager.save(25, state, input_states={}, metadata={})
        manager.wait_until_finished()
        assert manager.newest_sound_step() == 25

    [message] = lines
    name = file.relative_to(tmp_path / "checkpoint_00000025")
    digest = xxhash.xxh3_128_hexdigest(intact)[:12]
    kind = {"flipped": "altered", "deleted": "missing"}.get(damage, "short")
    assert message.startswith(
        f"CHECKPOINT DAMAGED: step 25 in {tmp_path}/checkpoint_00000025\n"
        f"  {name}: {kind}, expected {len(intact)} bytes with xxh3_128 {digest}"
    )
    assert message.endswith(
        "  Step 10 is used instead; work lost: 15 steps.\n"
        "  It was moved aside to damaged_checkpoint_00000025."
    )
    aside = tmp_path / "damaged_checkpoint_00000025" / name
    assert not aside.exists() if damage == "deleted" else aside.read_bytes() != intact


@BOTH_FORMATS
def test_save_reads_no_file_twice_and_a_single_file_not_at_all(tmp_path, state_format, monkeypatch):
    read, hash_file = [], integrity._hash_file
    monkeypatch.setattr(
        integrity, "_hash_file", lambda path, *name: read.append(path) or hash_file(path, *name)
    )
    save(tmp_path, 3, state_format=state_format)
    assert len(read) == len(set(read))
    assert any("ocdbt.process_0" in str(path) for path in read) == (
        state_format is StateFormat.TENSORSTORE
    )
    assert not any(path.name == "state.msgpack" for path in read)
    assert not list(tmp_path.glob("checkpoint_00000003/hashed_by*"))


def test_every_file_but_those_of_the_commit_is_verified(tmp_path):
    save(tmp_path, 3)
    step = tmp_path / "checkpoint_00000003"
    files = [path for path in step.rglob("*") if path.is_file()]
    unguarded = set()
    for path in files:
        intact = path.read_bytes()
        path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]) if intact else b"x")
        with CheckpointManager(tmp_path, read_only=True, report=lambda line: None) as manager:
            if manager.newest_sound_step() == 3:
                unguarded.add(str(path.relative_to(step)))
        path.write_bytes(intact)
    assert unguarded == {"_CHECKPOINT_METADATA", "commit_success.txt"}
    for name in unguarded:
        (step / name).write_bytes(b"\0\0")
    with CheckpointManager(tmp_path, policy=EVERY_STEP) as manager:  # and they do no harm
        restored = manager.restore(3, target_of(numbers(), everywhere))
        assert manager.save(4, restored.state, input_states={}, metadata={})
    assert_same_bits(restored.state, numbers())


def test_read_only_manager_skips_damaged_steps_without_moving_them(tmp_path):
    save(tmp_path, 1, 2)
    largest_file(tmp_path / "checkpoint_00000002").unlink()
    lines: list[str] = []
    with CheckpointManager(tmp_path, read_only=True, report=lines.append) as manager:
        assert manager.newest_sound_step() == 1
    assert len(lines) == 1 and "moved" not in lines[0]
    assert (tmp_path / "checkpoint_00000002").exists()


def test_restore_of_a_damaged_step_is_an_error(tmp_path):
    save(tmp_path, 1)
    step = tmp_path / "checkpoint_00000001"
    (step / "metadata" / "metadata.json").write_text("{}")
    with CheckpointManager(tmp_path) as manager, pytest.raises(DamagedCheckpointError) as error:
        manager.restore(1, target_of(numbers(), everywhere))
    assert f"The checkpoint {step} is damaged:\n  metadata/metadata.json: short" in str(error.value)


def test_unlisted_file_is_reported_and_ignored(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoint_00000001" / "state" / ".DS_Store").write_bytes(b"x")
    lines: list[str] = []
    with CheckpointManager(tmp_path, report=lines.append) as manager:
        assert manager.newest_sound_step() == 1
        manager.restore(1, target_of(numbers(), everywhere))
    assert len(lines) == 1 and "checkpoint_00000001/state/.DS_Store" in lines[0]


def test_later_layout_is_an_error(raises, tmp_path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("layerkit_runner.checkpointing.folders.LAYOUT_VERSION", 2)
        save(tmp_path, 1)
    with CheckpointManager(tmp_path) as manager, raises(LayoutVersionError, value=2):
        manager.restore(manager.newest_sound_step(), target_of(numbers(), everywhere))


def test_later_changes_of_an_input_state_are_not_saved(tmp_path):
    position = {"train": {"scope": "global", "position": [1]}}
    with CheckpointManager(tmp_path, policy=EVERY_STEP) as manager:
        manager.save(1, {"w": jnp.ones(4)}, input_states=position, metadata={})
        position["train"]["position"].append(2)
        restored = manager.restore(1, target_of({"w": jnp.ones(4)}, everywhere))
    assert restored.input_states["train"]["position"] == [1]


def test_package_import_does_not_import_orbax():
    program = (
        "import json, sys, layerkit_runner.checkpointing as c; c.CheckpointManager(sys.argv[1]);"
        "print(json.dumps([name for name in ('orbax.checkpoint', 'tensorstore', 'optax', "
        "'tensorflow') if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "/nowhere"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []


def unreadable_manifest(step: Path) -> None:
    """A folder in the place of a file cannot be read, even by root."""
    (step / "integrity/manifest.json").unlink()
    (step / "integrity/manifest.json").mkdir()


def dangling_link(step: Path) -> None:
    step.rename(step.with_name("away"))
    step.symlink_to("nowhere")


@pytest.mark.parametrize("spoil", [unreadable_manifest, dangling_link])
def test_unreadable_step_is_reported_and_saved_again(tmp_path, spoil):
    save(tmp_path, 1, 2)
    spoil(tmp_path / "checkpoint_00000002")
    lines: list[str] = []
    state = place(numbers(), everywhere)
    with CheckpointManager(tmp_path, policy=EVERY_STEP, report=lines.append) as manager:
        assert manager.newest_sound_step() == 1
        assert "checkpoint_00000002" in lines[0]
        assert "moved aside" in lines[0]
        assert manager.save(2, state, input_states={}, metadata={})
    with CheckpointManager(tmp_path, read_only=True) as manager:
        assert manager.newest_sound_step() == 2


def test_no_step_is_moved_if_all_are_damaged(tmp_path):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        unreadable_manifest(tmp_path / f"checkpoint_{step:08d}")
    lines: list[str] = []
    with CheckpointManager(tmp_path, policy=EVERY_STEP, report=lines.append) as manager:
        assert manager.newest_sound_step() is None
        assert manager.restore_newest(target_of(numbers(), everywhere)) is None
        assert manager.latest_step() == 2
    assert len(lines) == 4


def test_on_commit_is_called_after_the_commit(tmp_path):
    told: list[tuple[int, bool]] = []

    def on_commit(step: int) -> None:
        told.append((step, (tmp_path / f"checkpoint_{step:08d}").is_dir()))

    state = place(numbers(), everywhere)
    with CheckpointManager(tmp_path, policy=EVERY_STEP, on_commit=on_commit) as manager:
        for step in (1, 2):
            manager.save(step, state, input_states={}, metadata={})
    assert told == [(1, True), (2, True)]
    with CheckpointManager(tmp_path, policy=EVERY_STEP, on_commit=on_commit) as manager:
        manager.newest_sound_step()
    assert told[2:] == [(2, True)]
