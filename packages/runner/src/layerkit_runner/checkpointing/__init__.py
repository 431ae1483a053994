"""Checkpoints, from which a stopped job resumes.

`CheckpointManager` is the public class; `manager.py` describes the files. Importing this package
does not import Orbax, which is imported on first use.
"""

from layerkit_runner.checkpointing.errors import DamagedCheckpointError as DamagedCheckpointError
from layerkit_runner.checkpointing.errors import LayoutVersionError as LayoutVersionError
from layerkit_runner.checkpointing.errors import ProcessCountError as ProcessCountError
from layerkit_runner.checkpointing.errors import SaveError as SaveError
from layerkit_runner.checkpointing.errors import SaveTimeoutError as SaveTimeoutError
from layerkit_runner.checkpointing.manager import CheckpointManager as CheckpointManager
from layerkit_runner.checkpointing.policy import CheckpointPolicy as CheckpointPolicy
from layerkit_runner.checkpointing.policy import SavedStep as SavedStep
from layerkit_runner.checkpointing.stored_state import RestoredCheckpoint as RestoredCheckpoint
from layerkit_runner.checkpointing.stored_state import StateFormat as StateFormat
from layerkit_runner.checkpointing.stored_state import (
    StructureMismatchError as StructureMismatchError,
)
