"""Which checkpoint is next for a job that follows a training job's folder: the newest.

The folder belongs to the training job: steps appear in it, older ones are deleted, and after a loss
a step of the same number may be saved anew. A follower that is slower than the saves does not catch
up step by step; it takes the newest, and is told what it passed over.
"""

from __future__ import annotations

import dataclasses

from etils import epath

from layerkit_runner.checkpointing import folders, integrity


@dataclasses.dataclass(frozen=True)
class NewStep:
    """A step that was not there before.

    Attributes:
      step: The newest one that is committed.
      passed_over: Older steps that are there, and came after the one that was told before.
    """

    step: int
    passed_over: tuple[int, ...] = ()


class NewSteps:
    """Tells each newest step once. Files are not read, so they may be damaged.

    Args:
      directory: The folder of the checkpoints, which may not be there yet.
    """

    def __init__(self, directory: epath.Path) -> None:
        self._directory = directory
        self._told: tuple[int, str | None] | None = None

    def look(self) -> NewStep | None:
        """The newest step, if it is another than before or was saved anew; costs a listing."""
        steps = folders.committed_steps(self._directory)
        if not steps:
            return None
        newest = steps[-1]
        digest = integrity.step_digest(folders.step_folder(self._directory, newest))
        if (newest, digest) == self._told:
            return None
        before = -1 if self._told is None else self._told[0]
        self._told = (newest, digest)
        return NewStep(newest, tuple(step for step in steps[:-1] if step > before))
