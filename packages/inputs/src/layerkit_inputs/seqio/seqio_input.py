"""SeqIOInput: batches of a SeqIO task or mixture.

SeqIO defines sources, preprocessors, vocabularies, mixing rates and metrics. This module adds an
exact and small state, evaluations that end on all hosts together, and row numbers.

The field `each_host_reads` decides how hosts share the work:

* `everything`, in evaluation: each host reads all examples and keeps its rows of each global batch.
  All hosts end together after the last example. The state is the same on all hosts, and a run can
  resume with another number of hosts. Each host preprocesses the global batch, which avoids both
  counting the data set and communication.
* `own_shards`, in training: each host reads its own files, endlessly. Each host has its own state,
  which fits the same number of hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from layerkit.config.checks import require
from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput, Scope
from layerkit_inputs.base.errors import OnBadRecord, check_same_data, naming_input
from layerkit_inputs.base.evaluation import pad_rows
from layerkit_inputs.packing.model_features import NegativeIds
from layerkit_inputs.seqio.converters import FeatureConverter, FirstToken, RowFormat, Rows
from layerkit_inputs.seqio.eval_metrics import OutputKind, metric_functions, task_metrics
from layerkit_inputs.seqio.example_stream import (
    ExampleSource,
    MixedTasks,
    NumberedExample,
    SequentialTasks,
    TaskExamples,
)
from layerkit_inputs.seqio.shard_pipelines import ReadOptions
from layerkit_inputs.seqio.tasks import TaskOrMixture, WeightedTask, find_tasks

_LOG = logging.getLogger(__name__)
_ONE_SEQUENCE = ("language_model", "prefix_lm")
_FEATURES_OF = {
    "language_model": ("targets",),
    "prefix_lm": ("inputs", "targets"),
    "encoder_decoder": ("inputs", "targets"),
    "prompts": ("inputs",),
}


class SeqIOInput(BaseInput):
    """An input of a SeqIO task or mixture; `feature_converter` decides the arrays of a batch.

    Training reads the tasks endlessly by their rates. The next example is of the task furthest
    behind its rate, so any stretch of examples has the proportions of the mixture. An evaluation
    reads every example of each task once, in order. Its batches also have `provenance` (int32
    `[batch]`; number of the example, or of the row if packed; -1 for padding) and
    `eval_sample_weights` (float32 `[batch]`).
    """

    used_only_if: ClassVar[Conditions] = {
        "each_host_reads": "is_training",
        "mixture_or_task": "not mixture_name",
    }

    mixture_name: str | None = None
    """Registered name of a task or mixture."""
    mixture_or_task: TaskOrMixture | None = None
    """A `seqio.Task` or `seqio.Mixture`, instead of `mixture_name`."""
    split_name: str = "train"
    """Name of the split in the tasks."""
    task_feature_lengths: Mapping[str, int] | None = None
    """Largest number of tokens by task feature, `{"inputs": 512, "targets": 128}`. Required. In
    `language_model` and `prefix_lm`, tokens of the feature `suffixes` follow the targets of their
    example and alone have a loss; an example without suffix has the loss of its targets. Other
    features than these two are in the batch under their own names, `[batch, length]` in the dtype
    of the task, padded with zeros. They need `use_packing=False`."""
    feature_converter: FeatureConverter = "language_model"
    """`language_model`: `inputs` (if any) and `targets` as one sequence, with loss on all tokens.
    `prefix_lm`: the same with loss on `targets` only, and `inputs_indicator`. `encoder_decoder`:
    `src` and `tgt`. `prompts`: `ids`, `paddings` and `prompt_lengths` of the inputs."""
    weights_on_targets_only: bool | None = None
    """True for inputs without loss and score. None: True for `prefix_lm`. A negative id of a
    language model stands for its absolute value without loss, and with loss if this is False."""
    bos_id: int = 0
    """Id before the first token of an example."""
    first_token: FirstToken = "predicted"
    """`predicted`: ids begin with `bos_id`, and labels are the tokens. `given`: ids are the tokens,
    and labels are those of the next position of the row, the last of which has no loss
    (Pax's `reverse_bos_padding`). Only for `language_model`."""
    use_packing: bool | None = None
    """True to pack several examples into a row. None: True in training, except for `prompts`."""
    packing_window_rows: int = 32
    """Number of rows that are packed together. More rows waste less; resuming reads them again."""
    trim_output_features: bool = True
    """True to cut features at `task_feature_lengths`. False: a longer example is a bad record."""
    shuffle: bool | None = None
    """True to shuffle files in each epoch, and examples in a buffer. None: True in training."""
    shuffle_buffer_size: int | None = None
    """Number of examples in that buffer. None: that of the task."""
    num_shards: int | None = None
    """Number of parts of an epoch, which are read in order and have several files each. Fewer parts
    mix more files, and resuming reads a larger part again. None: one part per file."""
    each_host_reads: Literal["everything", "own_shards"] | None = None
    """Division of work between hosts, see above. None: `own_shards`. Evaluation always reads
    `everything`, since its examples are numbered over all hosts."""
    tfds_data_dir: str | None = None
    """Folder of the TFDS data of this input. None: the folder that the tasks give."""
    use_task_metrics: bool = True
    """True to compute the metrics of the tasks in evaluation."""
    on_bad_record: OnBadRecord = "refuse"
    """Policy for records that cannot be read: `refuse` raises, `skip` counts them."""

    def _data_text(self) -> str:
        names = ", ".join(dict.fromkeys(task.task.name for task in self._tasks))
        return f"split {self.split_name!r} of {names}: examples not counted"

    def __post_init__(self) -> None:
        """Set defaults, check the fields and find the tasks."""
        super().__post_init__()
        if self.use_packing is None:
            self.use_packing = self.is_training and self.feature_converter != "prompts"
        if self.shuffle is None:
            self.shuffle = self.is_training
        if not self.is_training:
            self.each_host_reads = "everything"
        elif self.each_host_reads is None:
            self.each_host_reads = "own_shards"
        # As in Praxis, False counts negative ids too, whereas None leaves them to the data.
        negative_ids: NegativeIds = (
            "weight" if self.weights_on_targets_only is False else "no_weight"
        )
        if self.weights_on_targets_only is None:
            self.weights_on_targets_only = self.feature_converter == "prefix_lm"
        self._seed = self.input_random_seed or 0
        self._check_at_least(1, "packing_window_rows", "shuffle_buffer_size", "num_shards")
        self._format = self._make_format(negative_ids)
        with naming_input(self._label):
            self._tasks: list[WeightedTask] = find_tasks(
                self.mixture_name or self.mixture_or_task,
                split=self.split_name,
                feature_lengths=self._format.lengths,
                tfds_data_dir=self.tfds_data_dir,
                is_training=self.is_training,
            )
        self._check_rows()
        self._opened: Rows | None = None
        self._start: dict[str, Any] = {}
        self._identity: dict[str, Any] = {}
        self._num_rows = 0

    # Implementation of BaseInput.

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap | None:
        """Return a batch of zeros.

        None for prompts, whose lengths are unknown, and for features that are passed through, whose
        dtypes only the task knows.
        """
        lengths = config.task_feature_lengths
        if config.feature_converter == "prompts" or lengths is None:
            return None
        if not lengths.keys() <= {"inputs", "targets"}:
            return None
        row_format = RowFormat(
            converter=config.feature_converter,
            lengths=lengths,
            packed=True,  # has the same arrays for rows without examples
            weights_on_targets_only=False,
            bos_id=config.bos_id,
        )
        batch = row_format.batch([[] for _ in range(rows)])
        is_packed = config.is_training if config.use_packing is None else config.use_packing
        if config.feature_converter == "encoder_decoder" and not is_packed:
            del batch.src.segment_pos, batch.tgt.segment_pos
        return batch

    @property
    def state_scope(self) -> Scope:  # type: ignore[override]
        """`global` if every host reads everything, else `host`."""
        return "global" if self.each_host_reads == "everything" else "host"

    def _next(self) -> NestedMap:
        size = self.local_batch_size
        first, num_rows = 0, size
        if self.each_host_reads == "everything":
            first, num_rows = self.infeed_host_index * size, self.global_batch_size
        read = self._read_rows(num_rows)
        rows = read[first : first + size]
        # On a host that has no rows left, any row gives the shapes.
        shown = rows or read[:1]
        batch = self._format.batch([[item.example for item in row] for _, row in shown])
        batch = batch.transform(lambda array: array[: len(rows)])
        if not self.is_training:
            batch.provenance = np.array([number for number, _ in rows], np.int32)
            batch.eval_sample_weights = np.ones(len(rows), np.float32)
        return pad_rows(batch, size - len(rows), copy=False)

    def _read_rows(self, most: int) -> list[tuple[int, list[NumberedExample]]]:
        """Return the next rows with their numbers; raise StopIteration if there is none."""
        stream = self._rows()
        rows: list[tuple[int, list[NumberedExample]]] = []
        for _ in range(most):
            try:
                row = stream.read()
            except StopIteration:
                if not rows:
                    raise
                break
            rows.append((self._num_rows if self.use_packing else row[0].number, row))
            self._num_rows += 1
        return rows

    def _reset(self) -> None:
        self._num_rows = 0
        if self._opened is not None:
            self._opened.set_position(self._start)

    def _reader_state(self) -> dict[str, Any]:
        rows = self._rows()
        return {"num_rows": self._num_rows, "at": rows.position(), "data": self._identity}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        rows = self._rows()
        check_same_data(self._label, position["data"], self._identity)
        self._num_rows = position["num_rows"]
        rows.set_position(position["at"])

    def _close(self) -> None:
        self._opened = None

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Return the text of token ids, up to the first end of sequence.

        Args:
          ids: Token ids, int `[batch, length]`.
          lengths: Number of ids to read in each row, int `[batch]`.
          key: `src` for the vocabulary of `inputs`, else that of `targets`.
        """
        features = self._tasks[0].task.output_features
        feature = "inputs" if key == "src" or "targets" not in features else "targets"
        vocabulary = features[feature].vocabulary
        return [
            vocabulary.decode([int(token) for token in row[:length]])
            for row, length in zip(ids, lengths, strict=True)
        ]

    # Metrics of the tasks.

    @property
    def has_score_metrics(self) -> bool:
        """True if a task has metrics of scores, in evaluation."""
        return self._has_metrics("scores")

    @property
    def has_prediction_metrics(self) -> bool:
        """True if a task has metrics of predictions, in evaluation."""
        return self._has_metrics("predictions")

    def score_metrics(self, scores: Mapping[int, float]) -> dict[str, float]:
        """Compute the `(targets, scores)` metrics of the tasks; see `eval_metrics`."""
        return self._metrics("scores", scores)

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Compute the `(targets, predictions)` metrics of the tasks; see `eval_metrics`."""
        return self._metrics("predictions", predictions)

    def _has_metrics(self, kind: OutputKind) -> bool:
        return self._computes_metrics and any(metric_functions(t, kind) for t in self._task_list)

    def _metrics(self, kind: OutputKind, outputs: Mapping[int, Any]) -> dict[str, float]:
        if not self._has_metrics(kind):
            return {}
        whole = bool(self.reset_for_eval) and self.eval_loop_num_batches is None
        tasks = self._task_examples(endless=False, whole_examples=True)
        examples = iter(SequentialTasks(tasks, endless=False).read, None)  # to StopIteration
        return task_metrics(self._task_list, examples, outputs, kind=kind, whole_epoch=whole)

    @property
    def _task_list(self) -> list[Any]:
        return [weighted.task for weighted in self._tasks]

    @property
    def _computes_metrics(self) -> bool:
        return self.use_task_metrics and not self.is_training

    # Data are opened at the first batch or state, not at construction.

    def _rows(self) -> Rows:
        if self._opened is None:
            tasks = self._task_examples(endless=self.is_training, whole_examples=False)
            self._identity = self._describe(tasks)
            self._opened = Rows(
                self._examples(tasks),
                self._format,
                window_rows=self.packing_window_rows,
                bad_records=self._bad,
            )
            self._start = self._opened.position()
        return self._opened

    def _task_examples(self, *, endless: bool, whole_examples: bool) -> list[TaskExamples]:
        own_shards = self.each_host_reads == "own_shards"
        options = ReadOptions(
            split=self.split_name,
            feature_lengths=self._format.lengths,
            trim_output_features=self.trim_output_features,
            shuffle=bool(self.shuffle),
            shuffle_buffer_size=self.shuffle_buffer_size,
            seed=self._seed,
            num_shards=self.num_shards,
            share=(self.infeed_host_index, self.num_infeed_hosts) if own_shards else (0, 1),
            endless=endless,
            whole_examples=whole_examples,
            bad_records=self._bad,
        )
        return [TaskExamples(weighted.task, options) for weighted in self._tasks]

    def _examples(self, tasks: list[TaskExamples]) -> ExampleSource:
        if not self.is_training:
            return SequentialTasks(tasks, endless=self.endless)
        rates = [float(weighted.rate()) for weighted in self._tasks]
        require(sum(rates) > 0, self._label, "rates of the mixture", rates, "a positive sum")
        return MixedTasks(tasks, rates)

    def _describe(self, tasks: list[TaskExamples]) -> dict[str, Any]:
        """Return JSON values that determine the rows; a state fits only equal ones."""
        order = {"shuffle_buffer_size": self.shuffle_buffer_size} if self.shuffle else {}
        packing = {"packing_window_rows": self.packing_window_rows} if self.use_packing else {}
        return {
            "num_shards": {examples.task.name: examples.num_shards for examples in tasks},
            "split_name": self.split_name,
            "task_feature_lengths": dict(self._format.lengths),
            "trim_output_features": self.trim_output_features,
            "feature_converter": self.feature_converter,
            "is_training": self.is_training,
            "seed": self._seed,
            "shuffle": self.shuffle,
            "use_packing": self.use_packing,
            **order,
            **packing,
        }

    def _make_format(self, negative_ids: NegativeIds) -> RowFormat:
        lengths = self.task_feature_lengths
        if not lengths or min(lengths.values()) < 1:
            expected = "positive lengths by feature, such as {'inputs': 512, 'targets': 128}"
            raise self._config_error(field="task_feature_lengths", value=lengths, expected=expected)
        missing = [name for name in _FEATURES_OF[self.feature_converter] if name not in lengths]
        expected = f"lengths of {missing}, for feature_converter={self.feature_converter!r}"
        require(not missing, self._label, "task_feature_lengths", dict(lengths), expected)
        if self.feature_converter != "language_model":
            expected = f"'predicted' for feature_converter={self.feature_converter!r}"
            is_predicted = self.first_token == "predicted"
            require(is_predicted, self._label, "first_token", self.first_token, expected)
        return RowFormat(
            converter=self.feature_converter,
            lengths=lengths,
            packed=bool(self.use_packing),
            weights_on_targets_only=bool(self.weights_on_targets_only),
            bos_id=self.bos_id,
            negative_ids=negative_ids,
            first_token=self.first_token,
        )

    def _check_rows(self) -> None:
        single = [*self._format.passed_through]
        single += ["metrics"] if self.has_score_metrics or self.has_prediction_metrics else []
        single += ["prompts"] if self.feature_converter == "prompts" else []
        expected = f"False, since {single} belong to single examples"
        is_valid = not (self.use_packing and single)
        require(is_valid, self._label, "use_packing", self.use_packing, expected)
        scores_inputs = "inputs" in self._format.lengths and not self.weights_on_targets_only
        if self.has_score_metrics and scores_inputs and self.feature_converter in _ONE_SEQUENCE:
            expected = "True, since the tasks have metrics of the scores of targets"
            value = self.weights_on_targets_only
            require(value, self._label, "weights_on_targets_only", value, expected)
        for task in self._task_list if self._computes_metrics else ():
            computed = len(metric_functions(task, "scores") + metric_functions(task, "predictions"))
            if len(task.metric_objs) > computed:
                _LOG.warning("task %s: metric objects and aux_values are not computed", task.name)
