"""Copies a step into another folder or store, in whole or not at all.

The copy is made under the name of an unfinished save, checked against the step's own manifest, and
renamed. So a copy that is killed leaves what the next training job there deletes as it would a
killed save, and a copy that is there is sound.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures

from etils import epath

from layerkit_runner.checkpointing import evaluations, folders, integrity

_BLOCK_BYTES = 8 * 2**20
_COPIERS = 8
_SECONDS_BETWEEN_REPORTS = 5.0


def copy_step(
    source: epath.Path, destination: epath.Path, step: int, *, report: Callable[[str], None]
) -> epath.Path:
    """Copies a step, and what evaluations found at it.

    Args:
      source: the folder of the checkpoints to copy from.
      destination: the folder of checkpoints to copy to; made if need be.
      step: a committed step.
      report: takes lines about the progress of long work.

    Returns:
      The folder of the copy.

    Raises:
      FileExistsError: the destination has this step.
      DamagedCheckpointError: the step is damaged; nothing is left of the copy.
      OSError: storage refused; nothing is left of the copy.
    """
    original = folders.step_folder(source, step)
    with new_step_folder(destination, step) as partial:
        sizes = integrity.file_sizes(original)
        sizes.pop(folders.COMMIT_FILE, None)  # the copy gets its own when it is whole
        progress = _Progress(f"step {step}", sum(sizes.values()), report)
        for folder in sorted({(partial / name).parent for name in sizes}):
            folder.mkdir(parents=True, exist_ok=True)
        with futures.ThreadPoolExecutor(_COPIERS) as copiers:
            for _ in copiers.map(
                lambda name: _copy_file(original / name, partial / name, progress), sizes
            ):
                pass
        integrity.require_sound(
            f"The copy of {original} is not what was saved",
            integrity.verify(partial),
            hint="It was deleted. Whether the original is damaged tells: verify.",
        )
    copy_evaluations(source, destination, step)
    return folders.step_folder(destination, step)


def copy_evaluations(source: epath.Path, destination: epath.Path, step: int) -> None:
    """Takes over what evaluations found at a step."""
    found = evaluations.read(source).get(step)
    if found is not None:
        evaluations.write(destination, {**evaluations.read(destination), step: found})


@contextlib.contextmanager
def new_step_folder(directory: epath.Path, step: int) -> Iterator[epath.Path]:
    """A folder to fill, which becomes the step at the end of the block, or is deleted if it fails.

    Raises:
      FileExistsError: there is such a step.
    """
    final = folders.step_folder(directory, step)
    if step in folders.committed_steps(directory):
        raise FileExistsError(f"{final} is there already; nothing was changed")
    partial = folders.new_unfinished(directory, step)
    try:
        yield partial
        folders.commit(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.rmtree()
        raise


class _Progress:
    """Says now and then how much of the work is done; several threads add to it."""

    def __init__(self, name: str, num_bytes: int, report: Callable[[str], None]) -> None:
        self._name, self._num_bytes, self._report = name, num_bytes, report
        self._done = 0
        self._last = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        if time.monotonic() - self._last > _SECONDS_BETWEEN_REPORTS:
            self._last = time.monotonic()
            share = self._done / self._num_bytes
            self._report(f"{self._name}: {share:.0%} of {self._num_bytes / 2**20:,.0f} MiB")


def _copy_file(source: epath.Path, destination: epath.Path, progress: _Progress) -> None:
    with source.open("rb") as reader, destination.open("wb") as writer:
        while block := reader.read(_BLOCK_BYTES):
            writer.write(block)
            progress.add(len(block))
