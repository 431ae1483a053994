"""SeqIOInput: batches from a SeqIO task or mixture.

SeqIO defines the data: sources, preprocessors, vocabularies, mixing rates, metrics. What a run
needs beyond it is here: an exact and small state, hosts that end together, rows known by number.

How hosts divide the work is one field, `each_host_reads`:

* `everything`, in evaluation: a host reads all examples and keeps its rows of each global batch.
  All hosts end together, to the last example, and the state is one for all: a run may go on with
  another number of hosts. Every host preprocesses the global batch, not its own rows alone; that
  is the price of an exact end without counting a data set or asking another host.
* `own_shards`, in training: a host reads its own files, endlessly. The state is its own and fits as
  many hosts as there were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecords, OnBadRecord
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import pad_rows
from layerkit_inputs.seqio_adaptor import eval_metrics
from layerkit_inputs.seqio_adaptor.converters import FeatureConverter, RowFormat, Rows
from layerkit_inputs.seqio_adaptor.example_stream import (
    ExampleSource,
    Mixed,
    NumberedExample,
    OneAfterTheOther,
    TaskExamples,
)
from layerkit_inputs.seqio_adaptor.shard_pipelines import ReadOptions
from layerkit_inputs.seqio_adaptor.tasks import WeightedTask, find_tasks
from layerkit_inputs.state import Scope, why_data_differ

_FEATURES_OF = {
    "language_model": ("targets",),
    "prefix_lm": ("inputs", "targets"),
    "encoder_decoder": ("inputs", "targets"),
    "prompts": ("inputs",),
}


class SeqIOInput(BaseInput):
    """Batches of a SeqIO task or mixture; which arrays they hold, `feature_converter` says.

    Training reads the tasks endlessly, by their rates: always of the task that is furthest behind
    its share, so that any stretch of examples has the proportions of the mixture. An evaluation
    reads each task of a mixture once, one after the other, every example exactly once, and adds
    `provenance` (int32 `[batch]`, the number of the row's example or, packed, of the row; -1 for
    padding) and `eval_sample_weights` (float32 `[batch]`).
    """

    mixture_name: str | None = None
    """A task or mixture by its registered name."""
    mixture_or_task: Any = None
    """Instead of the name: a `seqio.Task` or `seqio.Mixture`."""
    split_name: str = "train"
    """As the tasks name it."""
    task_feature_lengths: Mapping[str, int] | None = None
    """Task feature -> most tokens, `{"inputs": 512, "targets": 128}`; required."""
    feature_converter: FeatureConverter = "language_model"
    """`language_model`: `inputs` (where there are any) and `targets` as one sequence, all counted.
    `prefix_lm`: the same, `targets` alone counted, and `inputs_indicator`. `encoder_decoder`: `src`
    and `tgt`. `prompts`: `ids`, `paddings`, `prompt_lengths` of the inputs, to be continued."""
    weights_on_targets_only: bool | None = None
    """Inputs count for no loss, and for no score. None: in `prefix_lm`."""
    bos_id: int = 0
    """What the first token of an example is predicted from."""
    use_packing: bool | None = None
    """Several examples in a row. None: while training."""
    packing_window_rows: int = 32
    """Rows that are filled together; more of them waste less, and a restart reads them again."""
    trim_output_features: bool = True
    """Cut features at `task_feature_lengths`. A longer example is a bad record otherwise."""
    shuffle: bool | None = None
    """Files in a new order each epoch, examples within a buffer. None: while training."""
    shuffle_buffer_size: int | None = None
    """Examples in that buffer; that of the next file fills meanwhile. None: as the task says."""
    num_shards: int | None = None
    """Parts in which an epoch is read, one after the other, several files each. Fewer parts mix
    more files, and a restart reads a larger one again. None: each file is one."""
    each_host_reads: Literal["everything", "own_shards"] | None = None
    """See the module. None: `own_shards` while training, else `everything`."""
    tfds_data_dir: str | None = None
    """Where this input's TFDS data are. None: where the tasks say."""
    use_task_metrics: bool = True
    """Compute the metrics of the tasks in evaluation."""
    on_bad_record: OnBadRecord = "refuse"
    """What to do with a record that cannot be read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_packing is None:
            self.use_packing = self.is_training and self.feature_converter != "prompts"
        if self.shuffle is None:
            self.shuffle = self.is_training
        if self.each_host_reads is None:
            self.each_host_reads = "own_shards" if self.is_training else "everything"
        if self.weights_on_targets_only is None:
            self.weights_on_targets_only = self.feature_converter == "prefix_lm"
        self._seed = self.input_random_seed or 0
        self._bad_records = BadRecords(self.on_bad_record)
        self._check_choices()
        self._check_numbers()
        self._format = self._check_lengths()
        self._tasks: list[WeightedTask] = find_tasks(
            self.mixture_or_task if self.mixture_name is None else self.mixture_name,
            split=self.split_name,
            feature_lengths=self._format.lengths,
            tfds_data_dir=self.tfds_data_dir,
            is_training=self.is_training,
            refuse=self._config_error,
        )
        self._check_metrics()
        self._opened: Rows | None = None
        self._start: dict[str, Any] = {}
        self._identity: dict[str, Any] = {}
        self._num_rows = 0

    # What BaseInput asks for.

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap | None:
        """All but prompts, whose lengths are not known before they are read."""
        if config.feature_converter == "prompts" or config.task_feature_lengths is None:
            return None
        row_format = RowFormat(
            converter=config.feature_converter,
            lengths=config.task_feature_lengths,
            packed=True,  # rows without examples look the same as those of one
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
        """`global` where every host reads everything."""
        return "global" if self.each_host_reads == "everything" else "host"

    @property
    def num_skipped(self) -> int:
        """Records left out so far."""
        return self._bad_records.num_skipped

    def _next(self) -> NestedMap:
        size = self.local_batch_size
        first, wanted = 0, size
        if self.each_host_reads == "everything":
            first, wanted = self.infeed_host_index * size, self.global_batch_size
        rows = self._read_rows(wanted)[first : first + size]
        batch = self._format.batch([[item.example for item in row] for _, row in rows])
        if not self.is_training:
            batch.provenance = np.array([number for number, _ in rows], np.int32)
            batch.eval_sample_weights = np.ones(len(rows), np.float32)
        return pad_rows(batch, size - len(rows), copy=False)

    def _read_rows(self, most: int) -> list[tuple[int, list[NumberedExample]]]:
        """The next rows, each with its number; raises StopIteration where there is none."""
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
        if problem := why_data_differ(position["data"], self._identity):
            raise self._config_error(problem)
        self._num_rows = position["num_rows"]
        rows.set_position(position["at"])

    def _close(self) -> None:
        self._opened = None

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of ids int `[batch, length]`, up to the first end of sequence.

        Args:
          ids: int `[batch, length]`.
          lengths: int `[batch]`; ids beyond them are not read.
          key: `src` for the vocabulary of `inputs`; else that of `targets`.
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
        """Whether a task has metrics of scores."""
        return self._computes_metrics and eval_metrics.have_scores(self._task_list)

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether a task has metrics of predictions."""
        return self._computes_metrics and eval_metrics.have_predictions(self._task_list)

    def score_metrics(self, scores: Mapping[int, float]) -> dict[str, float]:
        """What the tasks' `(targets, scores)` functions return; see `eval_metrics`."""
        if not self.has_score_metrics:
            return {}
        return eval_metrics.score_metrics(
            self._pass_over_examples(), scores, whole_epoch=self._is_whole_epoch
        )

    def prediction_metrics(
        self,
        predictions: Mapping[int, str],
        *,
        aux_values: Mapping[str, Mapping[int, Any]] | None = None,
    ) -> dict[str, float]:
        """What the tasks' `(targets, predictions[, aux_values])` functions return.

        Args:
          predictions: By `provenance`, the text.
          aux_values: Name -> by `provenance`, what else the model said of the example.
        """
        if not self.has_prediction_metrics:
            return {}
        return eval_metrics.prediction_metrics(
            self._pass_over_examples(),
            predictions,
            aux_values=aux_values,
            whole_epoch=self._is_whole_epoch,
        )

    @property
    def _task_list(self) -> list[Any]:
        return [weighted.task for weighted in self._tasks]

    @property
    def _computes_metrics(self) -> bool:
        return self.use_task_metrics and not self.is_training

    @property
    def _is_whole_epoch(self) -> bool:
        return bool(self.reset_for_eval)

    def _pass_over_examples(self) -> Iterator[NumberedExample]:
        """The examples of one evaluation again, one at a time, in their order."""
        tasks = self._task_examples(endless=False, whole_examples=True)
        stream = OneAfterTheOther(tasks, endless=False)
        while True:
            try:
                yield stream.read()
            except StopIteration:
                return

    # Reading begins at the first batch or state; building an input opens no data.

    def _rows(self) -> Rows:
        if self._opened is None:
            tasks = self._task_examples(endless=self.is_training, whole_examples=False)
            self._identity = self._describe(tasks)
            self._opened = Rows(
                self._examples(tasks),
                self._format,
                window_rows=self.packing_window_rows,
                bad_records=self._bad_records,
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
            bad_records=self._bad_records,
            refuse=self._config_error,
        )
        return [TaskExamples(weighted.task, options) for weighted in self._tasks]

    def _examples(self, tasks: list[TaskExamples]) -> ExampleSource:
        if not self.is_training:
            return OneAfterTheOther(tasks, endless=self.endless)
        rates = [float(weighted.rate()) for weighted in self._tasks]
        if min(rates) < 0 or not 0 < sum(rates) < float("inf"):
            names = [weighted.task.name for weighted in self._tasks]
            raise self._config_error(
                f"the mixture's rates are {dict(zip(names, rates, strict=True))}; expected numbers "
                ">= 0, not all of them 0."
            )
        return Mixed(tasks, rates)

    def _describe(self, tasks: list[TaskExamples]) -> dict[str, Any]:
        """What decides which rows there are, as JSON values; a state fits where it is equal."""
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

    # Field values that cannot work are refused when the input is built.

    def _check_choices(self) -> None:
        for field, choices in (
            ("feature_converter", get_args(FeatureConverter)),
            ("each_host_reads", ("everything", "own_shards")),
            ("on_bad_record", get_args(OnBadRecord)),
        ):
            value = getattr(self, field)
            if value not in choices:
                raise self._config_error(
                    f"{field}={value!r}{near_names(str(value), choices)} Expected one of {choices}."
                )
        if (self.mixture_name is None) == (self.mixture_or_task is None):
            raise self._config_error("set mixture_name or mixture_or_task, one of the two.")
        if self.each_host_reads == "own_shards" and not self.is_training:
            raise self._config_error(
                "each_host_reads='own_shards' outside of training; hosts would end after different "
                "numbers of batches. Leave it unset."
            )
        if self.shuffle and not self.is_training:
            raise self._config_error(
                "shuffle=True outside of training; an evaluation reads its examples in order, by "
                "which they are known. Leave it unset."
            )
        if self.use_packing and self.feature_converter == "prompts":
            raise self._config_error(
                "use_packing=True with feature_converter='prompts'; a row is one."
            )

    def _check_numbers(self) -> None:
        self._check_at_least(1, "packing_window_rows", "shuffle_buffer_size", "num_shards")
        if not 0 <= self._seed < 2**63:
            raise self._config_error(
                f"input_random_seed={self._seed}; expected 0 or more, below 2**63."
            )

    def _check_lengths(self) -> RowFormat:
        lengths = self.task_feature_lengths
        if lengths is None or not all(length >= 1 for length in lengths.values()):
            raise self._config_error(
                f"task_feature_lengths={lengths!r}; expected the most tokens of each feature, such "
                "as {'inputs': 512, 'targets': 128}."
            )
        missing = [name for name in _FEATURES_OF[self.feature_converter] if name not in lengths]
        if missing:
            raise self._config_error(
                f"feature_converter={self.feature_converter!r} reads {missing}, of which "
                f"task_feature_lengths={dict(lengths)} says nothing."
            )
        return RowFormat(
            converter=self.feature_converter,
            lengths=lengths,
            packed=bool(self.use_packing),
            weights_on_targets_only=bool(self.weights_on_targets_only),
            bos_id=self.bos_id,
        )

    def _check_metrics(self) -> None:
        if not self._computes_metrics:
            return
        for task in self._task_list:
            eval_metrics.check_metrics(task, self._config_error)
        counts_inputs = (
            self.feature_converter in ("language_model", "prefix_lm")
            and "inputs" in self._format.lengths
            and not self.weights_on_targets_only
        )
        if counts_inputs and self.has_score_metrics:
            names = [task.name for task in self._task_list if task.score_metric_fns]
            raise self._config_error(
                f"weights_on_targets_only=False, but tasks {names} have metrics of scores, which "
                "would include the tokens of the inputs. Expected True. Set "
                "weights_on_targets_only=True, or use_task_metrics=False."
            )
        if self.use_packing and (self.has_score_metrics or self.has_prediction_metrics):
            raise self._config_error(
                "use_packing=True outside of training, but the tasks have metrics, which need one "
                "example a row. Leave use_packing unset, or set use_task_metrics=False."
            )
