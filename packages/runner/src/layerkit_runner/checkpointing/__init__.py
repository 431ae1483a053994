"""Checkpoints: what a job writes so that it can go on after a stop.

`CheckpointManager` is the way in; `manager.py` says what a checkpoint holds. Importing this
package is cheap: Orbax is imported with the first use.
"""

from layerkit_runner.checkpoints.errors import DamagedCheckpointError as DamagedCheckpointError
from layerkit_runner.checkpoints.errors import LayoutVersionError as LayoutVersionError
from layerkit_runner.checkpoints.errors import SaveError as SaveError
from layerkit_runner.checkpoints.errors import SaveTimeoutError as SaveTimeoutError
from layerkit_runner.checkpoints.formats import StateFormat as StateFormat
from layerkit_runner.checkpoints.input_states import ProcessCountError as ProcessCountError
from layerkit_runner.checkpoints.integrity import NewerManifestError as NewerManifestError
from layerkit_runner.checkpoints.manager import CheckpointManager as CheckpointManager
from layerkit_runner.checkpoints.manager import RestoredCheckpoint as RestoredCheckpoint
from layerkit_runner.checkpoints.policy import CheckpointPolicy as CheckpointPolicy
from layerkit_runner.checkpoints.policy import SavedStep as SavedStep
from layerkit_runner.checkpoints.structure import StructureMismatchError as StructureMismatchError
