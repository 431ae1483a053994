"""Checkpoints: what a job writes so that it can go on after a stop.

`CheckpointManager` is the way in; `manager.py` says what a checkpoint holds. Importing this
package is cheap: Orbax is imported with the first use.
"""

from layerkit_runner.checkpointing.errors import DamagedCheckpointError as DamagedCheckpointError
from layerkit_runner.checkpointing.errors import LayoutVersionError as LayoutVersionError
from layerkit_runner.checkpointing.errors import SaveError as SaveError
from layerkit_runner.checkpointing.errors import SaveTimeoutError as SaveTimeoutError
from layerkit_runner.checkpointing.formats import StateFormat as StateFormat
from layerkit_runner.checkpointing.input_states import ProcessCountError as ProcessCountError
from layerkit_runner.checkpointing.integrity import NewerManifestError as NewerManifestError
from layerkit_runner.checkpointing.manager import CheckpointManager as CheckpointManager
from layerkit_runner.checkpointing.manager import RestoredCheckpoint as RestoredCheckpoint
from layerkit_runner.checkpointing.policy import CheckpointPolicy as CheckpointPolicy
from layerkit_runner.checkpointing.policy import SavedStep as SavedStep
from layerkit_runner.checkpointing.structure import StructureMismatchError as StructureMismatchError
