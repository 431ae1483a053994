"""Readers of stored values: checkpoints of a job or of Paxml, and Hugging Face folders.

Names, shapes and dtypes are read first; values later, each straight into its sharding on the mesh.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
import optax
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import PARAMS
from layerkit.base.base_model import BaseModel
from layerkit.config import build, is_config
from layerkit.config.checks import require
from layerkit.errors import hub_hint
from layerkit.interop.hugging_face import families, folder, importing, tensors
from layerkit.interop.hugging_face.compressed.tensors import open_tensors
from layerkit.interop.hugging_face.other_forms import other_form
from layerkit.interop.peft.importing import PlacedAdapters, open_folders
from layerkit.models.language_model import LanguageModel
from layerkit_runner.checkpointing import CheckpointManager, folders
from layerkit_runner.checkpointing.integrity import require_sound, step_digest, verify_together
from layerkit_runner.checkpointing.stored_state import LeafPath, LeafSpec, join, named_leaves
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import absolute, is_remote
from layerkit_runner.files.text import near_folders
from layerkit_runner.init_from.pax.paxml_folders import PaxFolder, find
from layerkit_runner.init_from.settings import ADAPTER_WEIGHTS, Source
from layerkit_runner.step.train_state import ADAPTERS, TrainState, recorded_hugging_face

if TYPE_CHECKING:
    from layerkit_runner.init_from.pax.stored_pax import StoredPax

    # Values by path, such as `("params", "lm", "w")`; `leaves` have their shapes and dtypes.
    StoredValues: TypeAlias = "StoredCheckpoint | StoredHuggingFace | StoredAdapters | StoredPax"

_END_BYTES = 1 << 20
_STEP_NAME = re.compile(rf"{folders.STEP_PREFIX}_(\d+)")


@dataclasses.dataclass(frozen=True)
class Opened:
    """A source of the settings, and the values in its folder."""

    settings: Source
    stored: StoredValues


def open_sources(sources: Sequence[Source], state: TrainState, **options: Any) -> list[Opened]:
    """Open the folders of all sources; see `open_source`. Those of adapters become one.

    Raises:
      UsageError: A source with an adapter that is not the first has settings other than its scale.
    """
    opened: list[Opened] = []
    adapters: dict[str, float] = {}
    first, place = sources[0], 0
    for source in sources:
        kind = recognize(source.folder or "")
        if isinstance(kind, PeftFolder):
            if not adapters:
                first, place = source, len(opened)
            else:
                _require_defaults(source)
            path = str(kind.directory)
            adapters[path] = adapters.get(path, 0.0) + source.scale
        else:
            expected = f"1.0, since {source.folder} has no adapters"
            require(source.scale == 1.0, None, "scale", source.scale, expected)
            opened.append(open_source(source, state, **options))
    if adapters:
        opened.insert(place, Opened(first, StoredAdapters(adapters, model=options["model"])))
    return opened


def _require_defaults(source: Source) -> None:
    plain = Source(folder=source.folder, scale=source.scale)
    expected = "no value, since the settings of the first adapter apply to all"
    for name, default in vars(plain).items():
        value = getattr(source, name)
        require(value == default, source.folder, name, value, expected, UsageError)


def open_source(
    source: Source,
    state: TrainState,
    report: Callable[[str], None],
    *,
    optimizer: optax.GradientTransformation,
    model: BaseModel,
) -> Opened:
    """Open the folder of a source; only names, shapes and dtypes are read."""
    kind = recognize(source.folder or "")
    if isinstance(kind, PaxFolder):
        # Imported late, since few runs read checkpoints of Paxml.
        from layerkit_runner.init_from.pax.stored_pax import StoredPax

        pax_step, step_folder = kind.choose(source.step)
        names = _names_to_find(source, state)
        moments_of = optimizer if source.state_rules else None
        stored = StoredPax(step_folder, step=pax_step, like=names, optimizer=moments_of)
        return Opened(source, stored)
    if not isinstance(kind, CheckpointFolder):
        like = named_leaves(state) if source.rules is None else None
        return Opened(source, StoredHuggingFace(kind.directory, like=like, model=model))
    if source.step is not None and kind.step not in (None, source.step):
        raise UsageError(field="step", value=source.step, expected=f"the step of {source.folder}")
    step = kind.step if source.step is None else source.step
    return Opened(source, StoredCheckpoint(kind.directory, step=step, report=report))


def _names_to_find(source: Source, state: TrainState) -> dict[LeafPath, jax.ShapeDtypeStruct]:
    """Return the values of a run under the names that the rules of a source give them."""
    leaves = named_leaves(state)
    if source.weight_rules is None:
        return leaves
    renamed = {path: leaf for path, leaf in leaves.items() if path[0] != PARAMS}
    for path, leaf in leaves.items():
        origins = (rule.origin(join(path[1:]), leaf.shape) for rule in source.weight_rules)
        origin = next((one for one in origins if one is not None), None)
        for name in () if path[0] != PARAMS or origin is None else origin.names:
            renamed[PARAMS, *name.split("/")] = leaf
    return renamed


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, absolute; `step` is None unless the path names one step."""

    directory: epath.Path
    step: int | None


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder with `config.json` and safetensors files, absolute."""

    directory: epath.Path


@dataclasses.dataclass(frozen=True)
class PeftFolder:
    """A folder with an adapter of PEFT, absolute."""

    directory: epath.Path


def recognize(folder_path: str) -> CheckpointFolder | HuggingFaceFolder | PaxFolder | PeftFolder:
    """Return the kind of a folder: of a job, its checkpoints, one checkpoint, or Hugging Face."""
    directory = absolute(folder_path)
    hint = None if is_remote(directory) else other_form(directory).strip()
    expected = (
        "the folder of a job (of this project or of Paxml), of its checkpoints, of one"
        " checkpoint, of a Hugging Face model (config.json and *.safetensors), or of an adapter of"
        " PEFT (adapter_config.json)"
    )
    if not directory.is_dir():
        problem, hint = "the folder does not exist", hint or hub_hint(folder_path)
        near = near_folders(folder_path)
        raise UsageError(problem, value=folder_path, expected=expected, choices=near, hint=hint)
    pax = find(directory)
    if pax is not None:
        return pax
    named = _STEP_NAME.fullmatch(directory.name)
    if named and (directory / "state").is_dir():
        return CheckpointFolder(directory.parent, int(named[1]))
    place = folders.checkpoints_folder(directory)
    if folders.committed_steps(place):
        return CheckpointFolder(place, None)
    children = [path.name for path in directory.iterdir()]
    if "config.json" in children and any(name.endswith(".safetensors") for name in children):
        if is_remote(directory):
            expected = "a local Hugging Face folder, such as a copy of this one"
            raise UsageError(field="folder", value=folder_path, expected=expected)
        return HuggingFaceFolder(directory)
    if "adapter_config.json" in children and not is_remote(directory):
        return PeftFolder(directory)
    problem = "no checkpoint" if children else "empty folder"
    raise UsageError(problem, field="folder", value=folder_path, expected=expected, hint=hint)


def weights_digest(folder_path: str) -> str:
    """Return a digest of the weights in a folder, of the newest step by default.

    Of a Hugging Face folder, the sizes and both ends of the files count.
    """
    kind = recognize(folder_path)
    if isinstance(kind, CheckpointFolder):
        steps = [kind.step] if kind.step is not None else folders.committed_steps(kind.directory)
        return str(step_digest(folders.step_folder(kind.directory, steps[-1])))
    hasher = hashlib.sha256()
    for path in sorted(kind.directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            hasher.update(f"{path.name} {size}".encode())
            for place in (0, max(size - _END_BYTES, 0)):
                file.seek(place)
                hasher.update(file.read(_END_BYTES))
    return hasher.hexdigest()


class StoredCheckpoint:
    """A checkpoint of either format, written under any partitioner; `leaves` are by path."""

    def __init__(
        self, directory: epath.Path, *, step: int | None, report: Callable[[str], None]
    ) -> None:
        """Open a checkpoint, by default the newest that is not damaged; no values are read."""
        self.step = _choose(directory, step, report)
        self.label = f"{directory}:{self.step}"
        # The job may have begun with the weights of such a folder itself.
        try:
            self.hugging_face = recorded_hugging_face(directory.parent)
        except UsageError as error:  # The weights are intact.
            report(f"an export will have no tokenizer: {error}")
            self.hugging_face = None
        self._state = folders.step_folder(directory, self.step) / "state"
        folders.read_metadata(self._state.parent)  # raises an error for a later layout
        # Orbax takes most of a second to import.
        from layerkit_runner.checkpointing import handlers

        self.leaves: Mapping[LeafPath, LeafSpec] = handlers.stored_leaves(self._state)
        if any(path[-1] == "weight_sum" for path in self.leaves):
            report(
                f"{self.label} is of a schedule-free optimizer: its weights are those of training,"
                " not the averages to evaluate, which --mode=export writes"
            )

    def read(self, like: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Read some of the values, each into the sharding of `like`.

        A process reads only what its devices hold. A single file (`StateFormat.MSGPACK`) is read
        one value at a time.
        """
        from layerkit_runner.checkpointing import handlers

        return handlers.read_state(self._state, like)


def _choose(directory: epath.Path, step: int | None, report: Callable[[str], None]) -> int:
    if step is None:
        with CheckpointManager(directory, read_only=True, report=report) as checkpoints:
            step = checkpoints.newest_sound_step()
        if step is None:
            raise UsageError("every checkpoint is damaged", field="folder", value=str(directory))
        return step
    steps = folders.committed_steps(directory)
    if step not in steps:
        owner = str(directory)
        raise UsageError("no such checkpoint", owner=owner, field="step", value=step, choices=steps)
    path = folders.step_folder(directory, step)
    require_sound(path, verify_together(path))
    return step


class StoredHuggingFace:
    """Weights of a Hugging Face folder, named as in the model that config.json describes."""

    step = None

    def __init__(
        self, directory: epath.Path, *, like: Collection[LeafPath] | None, model: BaseModel
    ) -> None:
        """Read config.json and the names of the tensors.

        Layers are named as a stack, one by one, or as in the network of `model`, whichever shares
        more names with the weights `like`.
        """
        self.label = self.hugging_face = str(directory)
        self._directory = directory
        with as_usage_error(OSError, ValueError, ImportError):
            self._family = families.family_in(folder.read_json(directory))
            self._chosen = self._anatomy(repeated=True)
            if like is not None and not self._chosen.weights.keys() <= set(like):
                ways = [self._chosen, self._anatomy(repeated=False), *self._anatomy_of(model)]
                self._chosen = max(ways, key=lambda way: len(way.weights.keys() & set(like)))
            source = open_tensors(directory)
            dtypes = importing.stored_dtypes(source, self._family, self._chosen)
        self.leaves: Mapping[LeafPath, LeafSpec] = {
            path: LeafSpec(tuple(weight.shape), dtypes[path])  # the dtype in the files
            for path, weight in self._chosen.weights.items()
            if path in dtypes
        }

    def read(self, like: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Read some of the weights, slice by slice, each into the sharding of `like`."""
        with as_usage_error(OSError, ValueError, owner=self.label):
            source, tree = open_tensors(self._directory), unflatten_dict(like)
            read = importing.read_weights(source, self._family, self._chosen, like=tree)
        return flatten_dict(read)

    def _anatomy_of(self, model: BaseModel) -> list[tensors.Anatomy]:
        """Return the anatomy of a model's network, such as a pipelined one, if it has one."""
        family = self._family
        network = getattr(model, family.network_field, None)
        if not is_config(network):
            return []
        plain = build(family.model_class.HParams.config(**{family.network_field: network}))
        return [tensors.dissect(plain, family.rows).drop(ADAPTER_WEIGHTS)]

    def _anatomy(self, *, repeated: bool) -> tensors.Anatomy:
        model = build(importing.model_config(self._directory, repeated=repeated))
        return tensors.dissect(model, self._family.rows)


class StoredAdapters:
    """Weighted adapters in folders of PEFT, named as in a model that has adapters."""

    step = hugging_face = None

    def __init__(self, adapters: Mapping[str, float], *, model: BaseModel) -> None:
        """Match the modules of the folders with the network of `model`, its field `lm_tpl`."""
        self.label = ADAPTERS + " + ".join(adapters)
        network: Any = getattr(model, "lm_tpl", None)
        if not is_config(network):
            expected = f"a language model for {self.label}"
            raise UsageError(field="task.model", value=type(model).__qualname__, expected=expected)
        plain = LanguageModel.HParams.config(lm_tpl=network)
        with as_usage_error(OSError, ValueError, ImportError, owner=self.label):
            self.placed = PlacedAdapters(open_folders(adapters), plain)
        dtype = np.dtype("float32")
        self.leaves = {path: LeafSpec(shape, dtype) for path, shape in self.placed.shapes.items()}

    def read(self, like: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Read some of the values, each into the sharding of `like`."""
        read: dict[LeafPath, jax.Array] = {}
        for path, spec in like.items():
            with as_usage_error(OSError, ValueError, owner=self.label):
                value = self.placed.read(path)
            read[path] = jax.make_array_from_callback(spec.shape, spec.sharding, value.__getitem__)
        return read
