"""List, verify and export checkpoints.

    python -m layerkit_runner.tools.checkpoints list DIR             steps, and why each is kept
    python -m layerkit_runner.tools.checkpoints verify DIR           compare digests, find NaN
    python -m layerkit_runner.tools.checkpoints show DIR --step=400  arrays of a step
    python -m layerkit_runner.tools.checkpoints convert DIR w.safetensors --to=safetensors

DIR is the folder of a job, or the folder of its checkpoints. `convert` never overwrites a file. No
accelerator is used.

Exit codes: 0 done, 1 a checkpoint is damaged or not finite, or storage failed, 2 the command line
is wrong.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from etils import epath

from layerkit.errors import UserError
from layerkit_runner.checkpointing import errors, folders, integrity, stored_state
from layerkit_runner.checkpointing.policy import (
    CheckpointPolicy,
    SavedStep,
    read_evaluations,
)
from layerkit_runner.config.help import read_command
from layerkit_runner.errors import StorageError, UsageError, recast
from layerkit_runner.files.atomic_write import absolute, read_regular
from layerkit_runner.files.text import draw_table, size_text
from layerkit_runner.run_options import Flag, non_negative

_TARGETS = ("safetensors",)

_NEWEST = Flag("step", non_negative, "the step; by default the newest", "STEP")
# The flags of each command.
_FLAGS = {
    "list": (Flag("read", bool, "detect damage by reading all files, not by sizes alone"),),
    "verify": (Flag("step", non_negative, "one step; by default all", "STEP"),),
    "show": (_NEWEST,),
    "convert": (
        Flag("to", str, f"format to write: {', '.join(_TARGETS)}", "FORMAT", choices=_TARGETS),
        _NEWEST,
        Flag("part", str, "part of the state to write", "PART", default="params"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    Args:
      arguments: Words after the program's name; None for those of this process.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except (UserError, OSError) as error:
        print(f"checkpoints: {error}", file=sys.stderr, flush=True)
        if isinstance(error, UsageError):
            return error.exit_code
        is_damage = isinstance(error, errors.DamagedCheckpointError)
        is_io_error = isinstance(error, OSError) and not isinstance(error, FileExistsError)
        return StorageError.exit_code if is_damage or is_io_error else UsageError.exit_code


def _run(words: Sequence[str]) -> int:
    command = read_command(words, _FLAGS, kind="command", page=__doc__ or "")
    if command is None:
        return 0
    name, values, paths = command
    places = ["DIR", "DEST"] if name == "convert" else ["DIR"]
    if len(paths) != len(places):
        raise UsageError(field="folders", value=paths, expected=" and ".join(places))
    if name == "convert" and values["to"] is None:
        raise UsageError("missing flag", field="--to", choices=_TARGETS)
    runs: dict[str, Callable[..., int]] = {
        "list": _list,
        "verify": _verify,
        "show": _show,
        "convert": _convert,
    }
    return runs[name](*paths, **values)


def _list(folder: str, *, read: bool) -> int:
    directory = _existing(folder)
    try:
        evaluations = read_evaluations(directory)
    except UserError as error:
        raise recast(StorageError, error) from error
    check = integrity.verify if read else integrity.compare_sizes
    paths = {step: folders.step_folder(directory, step) for step in _steps(directory, None)}
    damage = {step: [f for f in check(path) if f.is_damage] for step, path in paths.items()}
    saved = {
        step: SavedStep(step, _saved_at(path), evaluations.get(step, {}))
        for step, path in paths.items()
    }
    policy = _policy(paths[max(paths)])
    reasons = {} if policy is None else policy.reasons_to_keep([*saved.values()])
    rows = []
    for step, path in paths.items():
        kept = ", ".join(reasons.get(step, ())) or "deleted at the next save"
        row = (
            str(step),
            f"{saved[step].time:%Y-%m-%d %H:%M:%S}",
            size_text(sum(integrity.file_sizes(path).values())),
            stored_state.format_of(path / "state").value,
            f"NO, {len(damage[step])} file(s)" if damage[step] else "yes",
            _metric(saved[step].metrics, reasons.get(step, ())),
            "unknown" if policy is None else kept,
        )
        rows.append(row)
    head = ("step", "saved (UTC)", "size", "format", "intact", "metric", "kept as")
    print("\n".join(draw_table(rows, head=head)))
    for step, findings in damage.items():
        for finding in findings:
            print(f"step {step}: {finding}")
    for path in folders.unfinished_or_damaged(directory):
        print(f"not a checkpoint: {path.name}")
    if not read:
        print("intact: by the sizes of the files; --read or verify compares their bytes")
    return StorageError.exit_code if any(damage.values()) else 0


def _saved_at(step_directory: epath.Path) -> datetime.datetime:
    """Return the time of the commit of a step in UTC; without a record, that of its folder."""
    try:
        about = json.loads(read_regular(step_directory / "_CHECKPOINT_METADATA"))
        return datetime.datetime.fromtimestamp(about["commit_timestamp_nsecs"] / 1e9, datetime.UTC)
    except (OSError, ValueError, KeyError, TypeError):
        text = os.fspath(step_directory)
        seconds = step_directory.stat().mtime if "://" in text else os.stat(text).st_mtime
        return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _policy(step_directory: epath.Path) -> CheckpointPolicy | None:
    """Return the recorded retention policy; None if it is damaged, which the findings report.

    Raises:
      LayoutVersionError: A later version of this package wrote the step.
    """
    try:
        return folders.policy_of(folders.read_metadata(step_directory))
    except (errors.DamagedCheckpointError, TypeError):
        return None


def _metric(metrics: Mapping[str, float], reasons: Sequence[str]) -> str:
    """Return `NAME VALUE` of the retention metric, else of a loss, else of the first metric."""
    is_best = {reason.removeprefix("best ") for reason in reasons}
    names = sorted(
        metrics, key=lambda name: (name not in is_best, not name.endswith("/loss"), name)
    )
    return f"{names[0]} {metrics[names[0]]:.4g}" if names else ""


def _verify(folder: str, *, step: int | None) -> int:
    _use_cpu()
    from layerkit_runner.checkpointing import conversion

    directory = _existing(folder)
    is_damaged = False
    for number in _steps(directory, step):
        path = folders.step_folder(directory, number)
        findings = integrity.verify(path)
        damage = [finding for finding in findings if finding.is_damage]
        nonfinite = [] if damage else conversion.nonfinite_arrays(path)
        verdict = "DAMAGED" if damage else "NOT FINITE" if nonfinite else "intact"
        print(f"step {number}: {verdict}", flush=True)
        for finding in findings:
            print(f"  {finding}")
        if nonfinite:
            print(f"  {stored_state.describe(nonfinite)}")
        is_damaged |= bool(damage or nonfinite)
    return StorageError.exit_code if is_damaged else 0


def _show(folder: str, *, step: int | None) -> int:
    from layerkit_runner.checkpointing import handlers

    directory = _existing(folder)
    step = _steps(directory, step)[-1]
    path = folders.step_folder(directory, step)
    integrity.require_sound(path, integrity.verify(path))
    leaves = handlers.stored_leaves(path / "state")
    rows = []
    sizes: collections.Counter[str] = collections.Counter()
    for name, spec in leaves.items():
        sizes[name[0]] += spec.num_bytes
        shape = " × ".join(map(str, spec.shape)) or "scalar"
        rows.append((stored_state.join(name), shape, spec.dtype.name, f"{spec.num_bytes:,}"))
    print("\n".join(draw_table(rows, head=("array", "shape", "dtype", "bytes"))))
    parts = ", ".join(f"{part} {size_text(size)}" for part, size in sizes.items())
    print(f"step {step}: {len(leaves)} arrays, {size_text(sizes.total())} ({parts})")
    return 0


def _convert(folder: str, destination: str, *, to: str, step: int | None, part: str) -> int:
    _use_cpu()
    from layerkit_runner.checkpointing import conversion, handlers

    source, path = _existing(folder), absolute(destination)
    step = _steps(source, step)[-1]
    try:
        count = conversion.write_safetensors(source, path, step, part=part)
    except ImportError as error:
        hint = "Install it: pip install safetensors"
        raise UsageError(f"{error}", field="--to", value=to, hint=hint) from None
    except KeyError:
        stored = handlers.stored_leaves(folders.step_folder(source, step) / "state")
        parts = sorted({name[0] for name in stored})
        raise UsageError(field="--part", value=part, choices=parts) from None
    print(f"{path}: {count} arrays of step {step}")
    return 0


def _existing(directory: str) -> epath.Path:
    path = folders.checkpoints_folder(absolute(directory))
    if not folders.committed_steps(path):
        raise UsageError("no checkpoint found", owner=str(path))
    return path


def _steps(directory: epath.Path, step: int | None) -> list[int]:
    steps = folders.committed_steps(directory)
    if step is None:
        return steps
    if step not in steps:
        raise UsageError(owner=str(directory), field="--step", value=step, choices=steps)
    return [step]


def _use_cpu() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")


if __name__ == "__main__":
    sys.exit(main())
