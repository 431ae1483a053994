"""The report before the first step: versions, devices, model, data, sizes and folders."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit.base.weight_formats import scale_path
from layerkit.config import assigned_fields, target_of, walk_configs
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.prefetch import Prefetch
from layerkit_inputs.base.tokenizer_interface import end_disagreement
from layerkit_runner.config.config_tree import config_json
from layerkit_runner.data.host_inputs import cast_text
from layerkit_runner.data.train_inputs import TrainInputs
from layerkit_runner.distributed.devices import flag_lines, unused_plugins
from layerkit_runner.errors import as_usage_error
from layerkit_runner.files.text import size_text
from layerkit_runner.observers import RunInfo, StepWork, peak_flops
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.weight_selection import integer_paths, weight_decay_of
from layerkit_runner.partitioning import PmapPartitioner
from layerkit_runner.run.job import Job, environment, versions
from layerkit_runner.step.step_cost import model_flops_per_step, temporary_bytes
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import FirstState, TrainState

# Steps at which a schedule is read for its largest rate.
_NUM_RATES = 1001


@contextlib.contextmanager
def layer_notes() -> Iterator[list[str]]:
    """Collect what layers log while they are traced, such as the attention backend, each line once.

    Inside the block, records do not reach Python's root logger, whose handlers, such as
    TensorFlow's, would print them.
    """
    logger, lines = logging.getLogger("layerkit"), list[str]()
    level, propagate = logger.level, logger.propagate

    def collect(record: logging.LogRecord) -> bool:
        if (line := record.getMessage()) not in lines:
            lines.append(line)
        return False  # which ends the way of the record

    handler = logging.Handler(logging.INFO)
    handler.addFilter(collect)
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@dataclasses.dataclass(frozen=True)
class StartFacts:
    """What the report of a training run needs beside its first state.

    Attributes:
      works: Work of a step on each training data set or stage.
      info: Information about the run, as if it started at step 0.
      optimizers: Lines about the optimizers.
      data: Lines about the data of all training and evaluation programs.
    """

    works: list[StepWork]
    info: RunInfo
    optimizers: list[str]
    data: list[str]

    @classmethod
    def of(cls, job: Job, data: TrainInputs, inputs: Mapping[str, BaseInput]) -> StartFacts:
        """Return the facts about training on `data`; `inputs` are all data sets by name."""
        state = job.partitioner.abstract_stored_state(job.task)
        works = _step_works(job, state, data)
        learner = job.resolved.task.train.learner
        optimizers = [*optimizer_lines(job.task, learner, state.params)]
        return cls(works, _train_run_info(job, data, works), optimizers, [*data_lines(inputs)])


def data_lines(inputs: Mapping[str, BaseInput]) -> Iterator[str]:
    """Yield the lines about the data of inputs by name, which the inputs themselves report."""
    for name, dataset in inputs.items():
        with as_usage_error():
            yield from (f"data         {name}: {line}" for line in dataset.describe_data())


def start_lines(job: Job, data: TrainInputs, facts: StartFacts, first: FirstState) -> Iterator[str]:
    """Yield the lines that describe a run.

    Args:
      job: Job of the run.
      data: Training data sets.
      facts: Facts about the run.
      first: First state.
    """
    device = jax.devices()[0]
    known = versions()
    yield (
        f"layerkit {known['layerkit']}, jax {known['jax']}, {jax.device_count()} × "
        f"{device.device_kind}, {jax.process_count()} process(es)"
    )
    plugins = () if os.environ.get("JAX_PLATFORMS") else unused_plugins()
    if plugins and device.platform == "cpu":
        yield f"devices      CPU; this machine has no device of {', '.join(plugins)}"
    yield from flag_lines(job.options)
    yield f"experiment   {job.resolved.name} (task {job.task.name})"
    params, count = job.partitioner.abstract_stored_state(job.task).params, facts.info.num_params
    trained = num_params(job.task.train.learner.trained_weights.select(params))
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(first.state.params)})
    yield f"parameters   {count:,} ({', '.join(dtypes)} weights)" + (
        f", {trained:,} trained" if trained != count else ""
    )
    yield from facts.optimizers
    yield from rounding_lines(job.task.train.learner, params)
    yield f"partitioner  {job.partitioner.describe()}"
    if padded := job.partitioner.padding_text(job.task):
        yield f"padded       {padded}"
    yield from facts.data
    decoder = getattr(job.task.model, "decoder", None)
    for one in data.datasets:
        if one.name is not None:
            yield f"program      {one.name}, {one.steps} of every {data.num_turn_steps} steps"
        yield f"batch        {batch_text(one.abstract_batch)}"
        yield from input_lines(one.dataset, decoder_ids=getattr(decoder, "eos_ids", ()))
    yield f"state        {size_text(bytes_per_device(first.state))} per device with optimizer"
    train = job.task.train
    yield f"steps        {first.step} → {train.num_train_steps}"
    every = train.steps_per_summary
    yield f"metrics      every {'step' if every == 1 else f'{every} steps'}"
    yield from job.resolved.experiment.start_notes()
    yield from job.resolved.notes
    if job.options.pmap_use_tensorstore and not isinstance(job.partitioner, PmapPartitioner):
        yield "no effect    --pmap_use_tensorstore: only pmap runs have another format"
    saves = f"checkpoint every {train.save_interval_steps} steps"
    if not job.options.enable_checkpoint_saving:
        saves = "no checkpoints (--noenable_checkpoint_saving)"
    yield f"writing to   {job.given_directory}; {saves}"
    if first.provenance is not None:
        yield from first.provenance.lines()


def optimizer_lines(task: SingleTask, learner: Any, params: Any) -> Iterator[str]:
    """Yield lines about the decayed weights, rates and matrices of each optimizer.

    Args:
      task: Task with the learner.
      learner: Config of the learner.
      params: Weights, or their shapes.
    """
    optimizers = [learner.optimizer, *(one.optimizer for one in learner.auxiliary_optimizers)]
    steps = np.linspace(0, task.train.num_train_steps, _NUM_RATES).astype(np.int32)
    flat = flatten_dict(params)
    for weights, optimizer in zip(task.decayed_weights(params), optimizers, strict=True):
        if weights.optimizer:
            configs = [*walk_configs(optimizer)]
            function = target_of(configs[0]) if configs else optimizer
            kind = getattr(function, "__name__", type(function).__name__)
            rates = jax.jit(jax.vmap(weights.rate))(steps)
            rate = "a rate of its own" if rates is None else f"rate up to {float(rates.max()):.3g}"
            yield f"optimizer    {weights.optimizer}: {kind}, {rate}"
            split_heads = any(assigned_fields(one).get("split_heads") for one in configs)
            updated = {path: flat[path] for path in (*weights.decayed, *weights.spared)}
            from layerkit_runner.optim.matrix.matrices import matrix_lines

            with task.declared_weights():
                rows = matrix_lines(updated, split_heads=split_heads)
            yield from (f"matrices     {row}" for row in rows)
        yield from weights.lines(flat, strength=weight_decay_of(optimizer))


def rounding_lines(learner: Learner, params: Any) -> Iterator[str]:
    """Yield lines about trained weights, or their shapes, that small updates may not change."""
    trained = jax.tree.leaves(learner.trained_weights.select(params))
    for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        count = sum(leaf.dtype == dtype for leaf in trained)
        if learner.stochastic_rounding and dtype == jnp.bfloat16 and not count:
            yield "no effect    learner.stochastic_rounding=True: no trained weight is in bfloat16"
        start = f"rounding     {count} of {len(trained)} trained weights are in {dtype.name}"
        if count and learner.stochastic_rounding and dtype == jnp.bfloat16:
            yield f"{start}, rounded stochastically"
        elif count:
            remedy = f"task.model.dtype=float32 with fprop_dtype={dtype.name}"
            if dtype == jnp.bfloat16:
                remedy = f"task.train.learner.stochastic_rounding=True, or {remedy}"
            eps = float(jnp.finfo(dtype).eps)
            part, decay = round(2 / eps), 1 - eps / 4
            lost = f"updates below 1/{part} of a weight are lost"
            if dtype == jnp.bfloat16:  # the moments of float16 weights are in float32
                lost += f", and moments do not fall with a decay above {decay:.4g}"
            yield f"{start}: {lost}. Set {remedy}"


def batch_text(batch: Any) -> str:
    """Return shape and fields of a batch, such as `8 × 128 (ids, labels)`."""
    # Fields may be nested, as in translation.
    shapes = dict(batch.flatten_items())
    ids = (leaf for path, leaf in shapes.items() if path.split(".")[-1] == "ids")
    first = next(ids, next(iter(shapes.values())))
    return f"{' × '.join(map(str, first.shape))} ({', '.join(shapes)})"


def input_lines(train_input: BaseInput, *, decoder_ids: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines about an input, casts of its batches and its tokenizer.

    Args:
      train_input: The input.
      decoder_ids: End tokens of the model's decoder.
    """
    inner = train_input.source if isinstance(train_input, Prefetch) else train_input
    hosts = "1 host" if inner.num_infeed_hosts == 1 else f"{inner.num_infeed_hosts} hosts"
    with as_usage_error():
        batch = train_input.peek()
    # A prefetched source may have read into a stage of other batches.
    rows = len(jax.tree.leaves(batch)[0])
    yield (
        f"input        {type(inner).__qualname__}, {hosts} of {rows} rows each;"
        f" its position takes {len(json.dumps(train_input.get_state())):,} bytes"
    )
    if casts := cast_text(batch):
        yield f"cast         {casts}"
    tokenizer = train_input.text_tokenizer()
    if note := getattr(inner, "note", getattr(tokenizer, "note", None)):
        yield f"tokenizer    {note}"
    if (special := inner.special_ids()) is not None:
        yield f"text ids     {special.text(getattr(tokenizer, 'special_tokens', {}))}"
        line = end_disagreement(tokenizer, decoder_ids, end_id=special.end)
        if line is not None:
            yield f"end tokens   {line}"


def compiled_lines(compiled: Sequence[Any], *, limit: int | None = None) -> Iterator[str]:
    """Yield lines about the memory of the largest step, if the compiler reports it.

    Args:
      compiled: Compiled steps.
      limit: Bytes of a device for programs; None for what the devices here report.
    """
    device = jax.local_devices()[0]
    if limit is None and device.platform != "cpu":
        limit = (device.memory_stats() or {}).get("bytes_limit")
    analyses = [memory for step in compiled if (memory := step.memory_analysis()) is not None]
    temporaries, totals = [], []
    for memory in analyses:
        if hasattr(memory, "temp_size_in_bytes"):
            temporaries.append(temporary_bytes(memory, platform=device.platform))
            others = memory.argument_size_in_bytes + memory.output_size_in_bytes
            totals.append(temporaries[-1] + others - memory.alias_size_in_bytes)
    if temporaries:
        yield f"step memory  {size_text(max(temporaries))} of temporaries per device"
    if limit is not None and max(totals, default=0) > limit:
        total, usable = size_text(max(totals)), size_text(limit)
        yield f"             WARNING: {total} with state and batch, above the {usable} of a device"


def run_info(job: Job, *, start_step: int) -> RunInfo:
    """Return the information about a run in any mode, without that of training."""
    return RunInfo(
        job_log_dir=job.directory,
        experiment=job.resolved.name,
        mode=job.mode,
        num_params=num_params(job.partitioner.abstract_stored_state(job.task).params),
        num_train_steps=job.task.train.num_train_steps,
        start_step=start_step,
        num_devices=job.partitioner.mesh.size,
        device_kind=jax.devices()[0].device_kind,
        environment=environment(),
        config=config_json(job.resolved),
    )


def stage_lines(data: TrainInputs, facts: StartFacts) -> Iterator[str]:
    """Yield a line about each stage, with a bound of its time on devices of known speed."""
    info = facts.info
    for index, (one, work) in enumerate(zip(data.inputs, facts.works, strict=True)):
        if one.last_step is not None:
            line = f"stage {index + 1}      {one}"
            if info.peak_flops_per_device and work.flops:
                speed = info.peak_flops_per_device * info.num_devices
                seconds = datetime.timedelta(seconds=round(one.steps * work.flops / speed))
                line += f"; at least {seconds} by its FLOPs"
            yield line


def _step_works(job: Job, state: TrainState, data: TrainInputs) -> list[StepWork]:
    works = []
    flops_of_row: dict[str, float] = {}  # by the shapes of a row
    for one in data.inputs:
        batch = one.abstract_batch
        rows = jax.tree.leaves(batch)[0].shape[0]
        columns = batch.ids.shape[1] if "ids" in batch and batch.ids.ndim > 1 else 0
        shapes = str([leaf.shape[1:] for leaf in jax.tree.leaves(batch)])
        if shapes not in flops_of_row:
            flops_of_row[shapes] = model_flops_per_step(job.resolved.task, state, batch, 1)
        flops = rows * flops_of_row[shapes]
        works.append(StepWork(examples=rows, tokens=rows * columns, flops=flops))
    return works


def _train_run_info(job: Job, data: TrainInputs, works: Sequence[StepWork]) -> RunInfo:
    """Return the information about a training run; a step has the mean work of its data sets."""
    known = run_info(job, start_step=0)

    def mean(values: Sequence[Any]) -> Any:
        if len(values) == 1:
            return values[0]
        return data.total(values, data.num_turn_steps) / data.num_turn_steps

    peak = job.options.peak_tflops_per_device
    return dataclasses.replace(
        known,
        tokens_per_step=mean([work.tokens for work in works]),
        examples_per_step=mean([work.examples for work in works]),
        flops_per_step=mean([work.flops for work in works]),
        peak_flops_per_device=peak_flops(known.device_kind) if peak is None else peak * 1e12,
        train_programs=tuple(one.name for one in data.inputs if one.name),
    )


def report_start(
    job: Job,
    data: TrainInputs,
    facts: StartFacts,
    first: FirstState,
    compiled: Sequence[str],
) -> None:
    """Report the run and start the observers."""
    train, report = job.task.train, job.observers.message
    if jax.process_index() == 0:
        for line in [*start_lines(job, data, facts, first), *compiled]:
            report(line)
    job.observers.start(dataclasses.replace(facts.info, start_step=first.step))
    capture = train.profiler_capture_step
    if capture is not None and not first.step < capture <= train.num_train_steps:
        report(
            f"no profile: task.train.profiler_capture_step={capture} is not one of the steps"
            f" {first.step + 1} to {train.num_train_steps} of this run"
        )


def num_params(params: Any) -> int:
    """Return the number of weights, frozen ones included.

    Weights that are stored in integers count without their scales, and two 4-bit ones share a byte.
    """
    flat = flatten_dict(params)
    scales = set(map(scale_path, integer_paths(flat)))
    return sum(
        math.prod(leaf.shape) * (2 if leaf.dtype == jnp.uint8 else 1)
        for path, leaf in flat.items()
        if path not in scales
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of a tree of sharded arrays (or their shapes) on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
