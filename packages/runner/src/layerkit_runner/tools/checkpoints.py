"""Lists, verifies, copies and converts checkpoints.

    python -m layerkit_runner.tools.checkpoints list DIR             steps, and why each stays
    python -m layerkit_runner.tools.checkpoints verify DIR           reads all; exit code 1: damage,
                                                                     or values that are not finite
    python -m layerkit_runner.tools.checkpoints show DIR --step=400  its arrays; or of the newest
    python -m layerkit_runner.tools.checkpoints copy DIR gs://b/run  all steps, or one
    python -m layerkit_runner.tools.checkpoints convert DIR NEW --to=msgpack      or tensorstore
    python -m layerkit_runner.tools.checkpoints convert DIR w.safetensors --to=safetensors

DIR is the folder of a job, or the one that its checkpoints are in. `copy` and `convert` write a
step in whole or not at all, and never over another one; `copy` passes over steps that it copied
before. Needs no accelerator and takes none.

Exit codes: 0 done, 1 a checkpoint is damaged or storage refused, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_runner.checkpointing import documents, errors, folders, formats, integrity, inventory
from layerkit_runner.errors import StorageError, UsageError
from layerkit_runner.files.atomic_write import absolute

_SAFETENSORS = "safetensors"
_TARGETS = (*(kind.value for kind in formats.StateFormat), _SAFETENSORS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    Args:
      arguments: The words after the program's name; those of this process by default.
    """
    options = _parser().parse_args(arguments)
    problem: Exception
    try:
        return options.run(options)
    except UsageError as error:
        problem, code = error, error.exit_code
    except (FileExistsError, errors.LayoutVersionError, errors.NewerManifestError) as error:
        problem, code = error, UsageError.exit_code
    except (errors.DamagedCheckpointError, OSError) as error:
        problem, code = error, StorageError.exit_code
    _tell(f"checkpoints: {problem}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        name = run.__name__.lstrip("_")
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("directory", metavar="DIR", help="of a job, or of its checkpoints")
        command.set_defaults(run=run)
        return command

    listing = add(_list, "the steps: date, size, format, whether sound, and why each stays")
    read = "look for damage by reading all, not by sizes alone"
    listing.add_argument("--read", action="store_true", help=read)
    step: dict[str, Any] = {"type": int, "metavar": "STEP"}
    one_or_all = step | {"help": "one step (default: all)"}
    one_or_newest = step | {"help": "which (default: the newest)"}
    verify = "read every file, compare it with what was saved, and look for NaN and infinities"
    add(_verify, verify).add_argument("--step", **one_or_all)
    add(_show, "arrays by name: shape, dtype, bytes").add_argument("--step", **one_or_newest)
    copy = add(_copy, "copy the steps that another folder or store lacks, and verify the copies")
    copy.add_argument("destination", metavar="DEST", help="of a job, or of its checkpoints")
    copy.add_argument("--step", **one_or_all)
    convert = add(_convert, "rewrite a step in another format")
    convert.add_argument("destination", metavar="DEST", help="of a job; a file for safetensors")
    convert.add_argument("--to", required=True, choices=_TARGETS)
    convert.add_argument("--step", **one_or_newest)
    part = "of the state, for safetensors (default: params)"
    convert.add_argument("--part", default="params", help=part)
    return parser


def _list(options: argparse.Namespace) -> int:
    directory = _existing(options.directory)
    _recorded_evaluations(directory)
    summaries = inventory.summarize(directory, read_files=options.read)
    rows = [("step", "saved (UTC)", "size", "format", "sound", "metric", "stays as")]
    for summary in summaries:
        reasons = summary.reasons
        row = (
            str(summary.step),
            f"{summary.time:%Y-%m-%d %H:%M:%S}",
            _size(summary.num_bytes),
            summary.state_format.value,
            f"NO, {len(summary.damage)} file(s)" if summary.damage else "yes",
            _metric(summary),
            "unknown" if reasons is None else ", ".join(reasons) or "goes with the next save",
        )
        rows.append(row)
    _print_table(rows)
    for summary in summaries:
        for finding in summary.damage:
            print(f"step {summary.step}: {finding}")
    for path in folders.set_apart(directory):
        print(f"not a checkpoint: {path.name}")
    if not options.read:
        print("sound: by the sizes of the files; --read or verify compares their bytes")
    return StorageError.exit_code if any(summary.damage for summary in summaries) else 0


def _metric(summary: inventory.StepSummary) -> str:
    """Return the metric of the retention policy, else a loss, else any."""
    is_best = {reason.removeprefix("best ") for reason in summary.reasons or ()}
    names = sorted(
        summary.metrics, key=lambda name: (name not in is_best, not name.endswith("/loss"), name)
    )
    return f"{names[0]} {summary.metrics[names[0]]:.4g}" if names else ""


def _verify(options: argparse.Namespace) -> int:
    _use_cpu()
    from layerkit_runner.checkpointing import conversion, structure

    directory = _existing(options.directory)
    is_damaged = False
    for step in _steps(directory, options.step):
        folder = folders.step_folder(directory, step)
        findings = integrity.verify(folder)
        damage = [finding for finding in findings if finding.is_damage]
        nonfinite = [] if damage else conversion.nonfinite_arrays(folder)
        verdict = "DAMAGED" if damage else "NOT FINITE" if nonfinite else "sound"
        print(f"step {step}: {verdict}", flush=True)
        for finding in findings:
            print(f"  {finding}")
        if nonfinite:
            print(f"  {structure.describe(nonfinite)}")
        is_damaged |= bool(damage or nonfinite)
    return StorageError.exit_code if is_damaged else 0


def _show(options: argparse.Namespace) -> int:
    from layerkit_runner.checkpointing import handlers, structure

    directory = _existing(options.directory)
    step = _steps(directory, options.step)[-1]
    folder = folders.step_folder(directory, step)
    integrity.require_sound(f"The checkpoint {folder} is damaged", integrity.verify(folder))
    leaves = handlers.stored_leaves(folder / "state")
    rows = [("array", "shape", "dtype", "bytes")]
    sizes: collections.Counter[str] = collections.Counter()
    for path, spec in leaves.items():
        sizes[path[0]] += spec.num_bytes
        shape = " × ".join(map(str, spec.shape)) or "scalar"
        rows.append((structure.join(path), shape, spec.dtype.name, f"{spec.num_bytes:,}"))
    _print_table(rows)
    parts = ", ".join(f"{part} {_size(size)}" for part, size in sizes.items())
    print(f"step {step}: {len(leaves)} arrays, {_size(sizes.total())} ({parts})")
    return 0


def _copy(options: argparse.Namespace) -> int:
    from layerkit_runner.checkpointing import conversion

    source = _existing(options.directory)
    destination = _checkpoints_of(options.destination)
    _recorded_evaluations(source)
    found = _recorded_evaluations(destination)
    there = folders.committed_steps(destination)
    passed_over, failed = [], []
    for step in _steps(source, options.step):
        try:
            if step in there:
                _require_copy(source, destination, step)
                if step not in found:  # it was evaluated after it was copied
                    conversion.copy_evaluations(source, destination, step)
                passed_over.append(step)
            else:
                print(conversion.copy_step(source, destination, step), flush=True)
        except (errors.DamagedCheckpointError, FileExistsError) as error:
            _tell(f"checkpoints: {error}")
            failed.append((step, error))
    if passed_over:
        print(f"there already, and sound: {_step_names(passed_over)}")
    if failed:
        print(f"not copied: {_step_names([step for step, _ in failed])}")
    is_mistake = all(isinstance(error, FileExistsError) for _, error in failed)
    return (UsageError.exit_code if is_mistake else StorageError.exit_code) if failed else 0


def _require_copy(source: epath.Path, destination: epath.Path, step: int) -> None:
    """Raise an error if the destination's step is damaged, or another one of the same number."""
    original, copy = (folders.step_folder(folder, step) for folder in (source, destination))
    integrity.require_sound(
        f"The checkpoint {copy}, which is there already, is damaged",
        integrity.verify(copy),
        hint="Nothing was changed. To copy it again, delete it.",
    )
    digest = integrity.step_digest(original)
    if digest is not None and digest != integrity.step_digest(copy):
        raise FileExistsError(
            f"{copy} is there already, and is not the step of {source}; nothing was changed"
        )


def _convert(options: argparse.Namespace) -> int:
    _use_cpu()
    from layerkit_runner.checkpointing import conversion, handlers

    source = _existing(options.directory)
    step = _steps(source, options.step)[-1]
    if options.to == _SAFETENSORS:
        path = absolute(options.destination)
        try:
            count = conversion.write_safetensors(source, path, step, part=options.part)
        except ImportError as error:
            raise UsageError(f"--to=safetensors needs: pip install safetensors ({error})") from None
        except KeyError:
            stored = handlers.stored_leaves(folders.step_folder(source, step) / "state")
            parts = sorted({name[0] for name in stored})
            raise UsageError(
                f"--part={options.part}: the state has no such part"
                f"{near_names(options.part, parts)} It has {first_names(parts)}."
            ) from None
        print(f"{path}: {count} arrays of step {step}")
        return 0
    destination = _checkpoints_of(options.destination)
    for directory in (source, destination):
        _recorded_evaluations(directory)
    state_format = formats.StateFormat(options.to)
    try:
        print(conversion.convert_step(source, destination, step, state_format=state_format))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def _checkpoints_of(directory: str) -> epath.Path:
    """Return the folder of checkpoints, given it or the job's."""
    path = absolute(directory)
    is_itself = path.name == folders.JOB_SUBFOLDER or folders.committed_steps(path)
    return path if is_itself else path / folders.JOB_SUBFOLDER


def _existing(directory: str) -> epath.Path:
    path = _checkpoints_of(directory)
    if not folders.committed_steps(path):
        raise UsageError(f"no checkpoint in {path}")
    return path


def _recorded_evaluations(directory: epath.Path) -> documents.Evaluations:
    """Return the recorded evaluations; a command reads them before it writes anything."""
    try:
        return documents.read_evaluations(directory)
    except ValueError as error:
        raise StorageError(str(error)) from error


def _steps(directory: epath.Path, wanted: int | None) -> list[int]:
    steps = folders.committed_steps(directory)
    if wanted is None:
        return steps
    if wanted not in steps:
        raise UsageError(
            f"--step={wanted}: {directory} has no such checkpoint; it has"
            f" {first_names(map(str, steps))}"
        )
    return [wanted]


def _step_names(steps: Sequence[int]) -> str:
    return f"{'step' if len(steps) == 1 else 'steps'} {first_names(map(str, steps))}"


def _size(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {unit}"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _use_cpu() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
