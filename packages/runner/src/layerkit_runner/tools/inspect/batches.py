"""`--mode=inspect --inspect=batches`: the first batches of each input, for each host.

No model is built. The inputs of all hosts are built in this process, and the devices are simulated:
as many as the mesh has, or else one for each host.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from layerkit.config import Config, build, target_of
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import num_rows_of
from layerkit_inputs.base.host_batches import FeedPlan, check_batch
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.chat.chat_input import ConversationFiles
from layerkit_inputs.mixing.staged_rows import StagedRows
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import (
    HostTopology,
    dataset_name,
    make_input,
    plan_input,
    skipped_line,
)
from layerkit_runner.data.staged_inputs import stage_rows, staged_config
from layerkit_runner.data.train_inputs import run_stages
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.run_options import RunOptions
from layerkit_runner.tools.inspect.batch_forms import SPECIAL, Part, batch_page, text_lines
from layerkit_runner.tools.inspect.batch_rows import (
    BatchView,
    Histogram,
    read_row,
    real_rows,
    sizes_of,
    token_sides,
    valid_tokens,
)
from layerkit_runner.tools.pages.page import write_page
from layerkit_runner.tools.plan.targets import start_simulated

_TEXT_ROWS, _PAGE_ROWS, _PAGE_IMAGES = 2, 4, 12
_PAGE_BATCHES = 4


def print_batches(resolved: ResolvedExperiment, options: RunOptions) -> None:
    """Print the first batches of each input of an experiment, or write their page."""
    with as_usage_error():
        partitioner = resolved.partitioner.Instantiate()
    devices = start_simulated(
        partitioner, num_devices=options.num_devices, default=max(1, options.num_hosts)
    )
    hosts = simulated_hosts(devices, options.num_hosts)
    simulated = f"{len(hosts)} host(s) of {len(devices) // len(hosts)} device(s) each are simulated"
    kinds = [*_kinds(resolved, partitioner, hosts[0], options.num_batches)]
    with as_usage_error():
        tokenizer = build(config) if (config := resolved.experiment.tokenizer()) else None
    is_page = options.html is not None
    inputs = (
        read_input(
            c, kind, partitioner, hosts, count, tokenizer, is_page=is_page, skipped_steps=steps
        )
        for c, kind, steps, count in kinds
    )
    if options.html is not None:
        page = batch_page(resolved.name, simulated, inputs)
        print(f"wrote {write_page(options.html, page)}")
        return
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    legend = "that count for the loss are green" if is_colored else "of weight 0 are in ⟦brackets⟧"
    print(f"{simulated}; labels {legend}, special ids in {SPECIAL.format('these')}")
    for parts in inputs:
        print()
        for line in text_lines(parts, is_colored=is_colored):
            print(line, flush=True)


def _kinds(
    resolved: ResolvedExperiment, partitioner: Partitioner, host: HostTopology, num_batches: int
) -> Iterator[tuple[Config, str, int, int]]:
    """Yield (config, kind, steps before it, batches to read) of each input and stage."""
    stages = run_stages(resolved)
    for config in resolved.datasets:
        if not (config.is_training and stages):
            yield config, "train" if config.is_training else "eval", 0, num_batches
            continue
        rows = stage_rows(config, stages, partitioner, host)
        staged = staged_config(config, rows, row_length=stages[0].row_length or 1)
        for number, (stage, one) in enumerate(zip(stages, rows, strict=True), start=1):
            steps = f"steps {stage.first_step} → {stage.last_step}"
            kind = f"train, stage {number} of {len(stages)}, {steps}:"
            size = one.batch / partitioner.mesh.size
            count = min(num_batches, stage.num_steps)
            yield staged.clone(percore_batch_size=size), kind, stage.first_step - 1, count
    for config in resolved.decode_datasets:
        yield config, "decode", 0, num_batches


def simulated_hosts(devices: list[jax.Device], num_hosts: int) -> list[HostTopology]:
    """Return the topologies of `num_hosts` hosts with equal numbers of consecutive devices."""
    if num_hosts < 1 or len(devices) % num_hosts:
        expected = f"a divisor of the {len(devices)} device(s) of this experiment"
        raise UsageError(field="--num_hosts", value=num_hosts, expected=expected)
    host_of = {device: index * num_hosts // len(devices) for index, device in enumerate(devices)}
    return [HostTopology(host, num_hosts, host_of.__getitem__) for host in range(num_hosts)]


def read_input(
    config: Config,
    kind: str,
    partitioner: Partitioner,
    hosts: list[HostTopology],
    num_batches: int,
    tokenizer: Tokenizer | None = None,
    *,
    is_page: bool = False,
    skipped_steps: int = 0,
) -> Iterator[Part]:
    """Yield the title of an input, lines about it, its first batches and their histograms.

    The batches are those of the first host, and the histograms count those of all hosts. A page
    has more rows, but not all tokens. `tokenizer` decodes the ids of an input that cannot. The
    batches of stages begin after `skipped_steps`.
    """
    plan = plan_input(config, partitioner, hosts[0])
    feeding = [feed.processes[0] for feed in plan.feeds]
    inputs: list[Any] = [make_input(config, partitioner, hosts[host]) for host in feeding]
    first = inputs[0]
    for source in inputs if skipped_steps else ():
        source.skip_steps(skipped_steps)
    reader: Any = target_of(config.source if target_of(config) is StagedRows else config)
    yield f"{kind} {dataset_name(config)} ({reader.__qualname__})"
    yield _size_text(first, plan)
    for feed in plan.feeds if len(hosts) > 1 else ():
        rows = ", ".join(f"{start} to {stop - 1}" for start, stop in feed.rows)
        names = "host" if len(feed.processes) == 1 else "hosts"
        yield f"{names} {', '.join(map(str, feed.processes))}: rows {rows} of each batch"
    sizes: dict[str, list[np.ndarray]] = {}
    for number in range(1, num_batches + 1):
        began = time.perf_counter()
        batches = {host: _next_batch(source) for host, source in zip(feeding, inputs, strict=True)}
        seconds = time.perf_counter() - began
        batch = batches[feeding[0]]
        if batch is None:
            yield f"the data end after {number - 1} batch(es)"
            break
        for one in filter(None, batches.values()):
            for title, values in sizes_of(one):
                sizes.setdefault(title, []).append(values)
        if is_page and number > _PAGE_BATCHES:
            continue
        on_page = _PAGE_ROWS if any(token_sides(batch)) else _PAGE_IMAGES
        yield BatchView(
            f"batch {number}, read in {seconds:.3f} s: {summary(batch)}",
            field_table(batch) if number == 1 else [],
            num_rows_of(batch),
            [
                read_row(first, batch, row, tokenizer, is_page=is_page)
                for row in range(min(on_page if is_page else _TEXT_ROWS, num_rows_of(batch)))
            ],
            [*_host_lines(batches)],
            issubclass(reader, ConversationFiles),
        )
    if is_page and num_batches > _PAGE_BATCHES:
        yield f"only the first {_PAGE_BATCHES} batches are drawn; histograms count all"
    yield from (Histogram(title, np.concatenate(values)) for title, values in sizes.items())
    yield f"state: {len(json.dumps(first.get_state())):,} bytes, scope {first.state_scope}"
    if skipped := sum(source.num_skipped for source in inputs):
        yield skipped_line(dataset_name(config), skipped)
    for source in inputs:
        source.close()


def _size_text(dataset: BaseInput, plan: FeedPlan) -> str:
    rows = f"{plan.batch_size * plan.num_infeed_hosts} rows a batch"
    if plan.num_infeed_hosts > 1:
        rows += f", {plan.batch_size} on each host that feeds some"
    if dataset.is_training:
        return f"{rows}; endless"
    most = dataset.eval_loop_num_batches
    if dataset.reset_for_eval:
        return f"{rows}; {'one epoch' if most is None else f'the first {most} batches'} each time"
    return f"{rows}; the next {most} batches each time"


def _next_batch(dataset: BaseInput) -> NestedMap | None:
    with as_usage_error(), contextlib.suppress(StopIteration):
        if dataset.is_training:
            return check_batch(dataset, dataset.get_next())
        return check_batch(dataset, dataset.get_next_padded(), is_padded=True)
    return None


def _host_lines(batches: Mapping[int, NestedMap | None]) -> Iterator[str]:
    """Yield a summary for each host but the first, and a warning if two read the same rows."""
    hosts: dict[bytes, int] = {}
    for position, (host, batch) in enumerate(batches.items()):
        if batch is None:
            yield f"host {host}: its data have ended"
            continue
        if position > 0:
            yield f"host {host}: {summary(batch)}"
        if real_rows(batch).any():
            content = b"".join(np.asarray(value).tobytes() for _, value in batch.flatten_items())
            if (earlier := hosts.setdefault(content, host)) != host:
                yield f"WARNING: hosts {earlier} and {host} read the same rows"


def summary(batch: NestedMap) -> str:
    """Return text such as `8 of 8 rows hold data | 3.1% padding | weights 1,987`."""
    rows = real_rows(batch)
    parts = [f"{rows.sum()} of {len(rows)} rows hold data"]
    for side, part in token_sides(batch):
        label = f"{side}: " if side else ""
        valid = valid_tokens(part)
        if valid is not None:
            parts.append(f"{label}{1 - valid.mean():.1%} padding")
        if "weights" in part:
            parts.append(f"{label}weights {np.sum(part.weights, dtype=np.float64):,.6g}")
    return " | ".join(parts)


def field_table(batch: NestedMap) -> list[tuple[str, ...]]:
    """Return a table with a row for each field: shape, dtype, least and greatest value."""
    rows: list[tuple[str, ...]] = [("field", "shape", "dtype", "min", "max")]
    for path, value in batch.flatten_items():
        array = np.asarray(value)
        ends = [f"{f(array).item():.6g}" if array.size else "" for f in (np.min, np.max)]
        rows.append((path, str(list(array.shape)), array.dtype.name, *ends))
    return rows
