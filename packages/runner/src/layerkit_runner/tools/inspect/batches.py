"""`--mode=inspect --inspect=batches`: the first batches of each input, for each host.

No model is built. The inputs of all hosts are built in this process, and the devices are simulated:
as many as the mesh has, or else one for each host.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from layerkit.config import Config, build, target_of
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import ROW_MARKS, example_rows, num_rows_of
from layerkit_inputs.base.host_batches import check_batch
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import (
    HostTopology,
    dataset_name,
    make_input,
    plan_input,
    skipped_line,
)
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.files.text import draw_table
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.run_options import RunOptions
from layerkit_runner.tools.plan.targets import start_simulated

_ROWS_SHOWN = 2
_MOST_CHARACTERS = 160
_NUMBERS_SHOWN = 8
_PAGE = """\
<!doctype html><meta charset="utf-8"><title>{}</title>
<style>pre {{ white-space: pre-wrap }} mark {{ background: #b7e4b7 }}</style>
<pre>{}</pre>
"""
_TAGS = str.maketrans({"\ue000": "<mark>", "\ue001": "</mark>"})


class Style(NamedTuple):
    """A form of labels by their weights, and the largest number of characters of a text."""

    weighted: str
    unweighted: str
    legend: str
    most_characters: int | None = _MOST_CHARACTERS


PLAIN = Style("{}", "⟦{}⟧", "labels of weight 0 are in ⟦brackets⟧")
TERMINAL = Style("\x1b[32m{}\x1b[0m", "{}", "labels that count for the loss are green")
# Texts hold no characters for private use, which stand for tags until the line is escaped.
HTML = Style("\ue000{}\ue001", "{}", TERMINAL.legend, None)
SPECIAL = "⟪{}⟫"
"""Mark of special ids, which distinguishes them from the same characters in the text."""


def print_batches(resolved: ResolvedExperiment, options: RunOptions) -> None:
    """Print the first batches of each input of an experiment, or write them to `options.html`."""
    with as_usage_error():
        partitioner = resolved.partitioner.Instantiate()
    devices = start_simulated(
        partitioner, num_devices=options.num_devices, default=max(1, options.num_hosts)
    )
    hosts = simulated_hosts(devices, options.num_hosts)
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    style = HTML if options.html else TERMINAL if is_colored else PLAIN
    lines = _lines(resolved, partitioner, hosts, options.num_batches, style=style)
    if options.html is None:
        for line in lines:
            print(line, flush=True)
        return
    text = "\n".join(map(escaped, lines))
    atomic_write(options.html, _PAGE.format(html.escape(resolved.name), text))
    print(f"wrote {options.html}")


def _lines(
    resolved: ResolvedExperiment,
    partitioner: Partitioner,
    hosts: list[HostTopology],
    num_batches: int,
    *,
    style: Style,
) -> Iterator[str]:
    """Yield the description of all inputs of an experiment."""
    yield (
        f"{len(hosts)} host(s) of {partitioner.mesh.size // len(hosts)} device(s) each are"
        f" simulated; {style.legend}, special ids in {SPECIAL.format('these')}"
    )
    kinds = [(c, "train" if c.is_training else "eval") for c in resolved.datasets]
    kinds += [(config, "decode") for config in resolved.decode_datasets]
    with as_usage_error():
        tokenizer = build(config) if (config := resolved.experiment.tokenizer()) else None
    for config, kind in kinds:
        yield ""
        yield from input_lines(
            config, kind, partitioner, hosts, num_batches, tokenizer, style=style
        )


def escaped(line: str) -> str:
    """Return a line of the style `HTML` with tags and escaped text."""
    return html.escape(line).translate(_TAGS)


def simulated_hosts(devices: list[jax.Device], num_hosts: int) -> list[HostTopology]:
    """Return the topologies of `num_hosts` hosts with equal numbers of consecutive devices."""
    if num_hosts < 1 or len(devices) % num_hosts:
        expected = f"a divisor of the {len(devices)} device(s) of this experiment"
        raise UsageError(field="--num_hosts", value=num_hosts, expected=expected)
    host_of = {device: index * num_hosts // len(devices) for index, device in enumerate(devices)}
    return [HostTopology(host, num_hosts, host_of.__getitem__) for host in range(num_hosts)]


def input_lines(
    config: Config,
    kind: str,
    partitioner: Partitioner,
    hosts: list[HostTopology],
    num_batches: int,
    tokenizer: Tokenizer | None = None,
    *,
    style: Style = PLAIN,
) -> Iterator[str]:
    """Yield the description of an input and of its first batches, on all hosts.

    `tokenizer` decodes the ids of an input that cannot decode them.
    """
    plan = plan_input(config, partitioner, hosts[0])
    feeding = [feed.processes[0] for feed in plan.feeds]
    inputs = [make_input(config, partitioner, hosts[host]) for host in feeding]
    first = inputs[0]
    yield f"{kind} {dataset_name(config)} ({target_of(config).__qualname__})"
    yield f"  {_size_text(first)}"
    for feed in plan.feeds if len(hosts) > 1 else ():
        rows = ", ".join(f"{start} to {stop - 1}" for start, stop in feed.rows)
        names = "host" if len(feed.processes) == 1 else "hosts"
        yield f"  {names} {', '.join(map(str, feed.processes))}: rows {rows} of each batch"
    for number in range(1, num_batches + 1):
        began = time.perf_counter()
        batches = {host: _next_batch(source) for host, source in zip(feeding, inputs, strict=True)}
        seconds = time.perf_counter() - began
        batch = batches[feeding[0]]
        if batch is None:
            yield f"  the data end after {number - 1} batch(es)"
            break
        yield f"  batch {number}, read in {seconds:.3f} s: {summary(batch)}"
        lines = field_table(batch) if number == 1 else []
        for row in range(min(_ROWS_SHOWN, len(real_rows(batch)))):
            lines += row_lines(first, batch, row, tokenizer, style=style)
        yield from (f"    {line}" for line in [*lines, *_host_lines(batches)])
    yield f"  state: {len(json.dumps(first.get_state())):,} bytes, scope {first.state_scope}"
    if skipped := sum(source.num_skipped for source in inputs):
        yield f"  {skipped_line(dataset_name(config), skipped)}"
    for source in inputs:
        source.close()


def _size_text(dataset: BaseInput) -> str:
    rows = f"{dataset.global_batch_size} rows a batch"
    if dataset.num_infeed_hosts > 1:
        rows += f", {dataset.local_batch_size} on each host that feeds some"
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


def real_rows(batch: NestedMap) -> np.ndarray:
    """Return bool `[batch]`: True for rows that hold data, False for padding."""
    rows = example_rows(batch)
    return np.ones(num_rows_of(batch), bool) if rows is None else rows


def summary(batch: NestedMap) -> str:
    """Return text such as `8 of 8 rows hold data | 3.1% padding | weights 1,987`."""
    rows = real_rows(batch)
    parts = [f"{rows.sum()} of {len(rows)} rows hold data"]
    for side, part in _sides(batch):
        label = f"{side}: " if side else ""
        valid = _valid(part)
        if valid is not None:
            parts.append(f"{label}{1 - valid.mean():.1%} padding")
        if "weights" in part:
            parts.append(f"{label}weights {np.sum(part.weights, dtype=np.float64):,.6g}")
    return " | ".join(parts)


def field_table(batch: NestedMap) -> list[str]:
    """Return a line for each field: shape, dtype, least and greatest value."""
    rows: list[tuple[str, ...]] = []
    for path, value in batch.flatten_items():
        array = np.asarray(value)
        ends = [f"{f(array).item():.6g}" if array.size else "" for f in (np.min, np.max)]
        rows.append((path, str(list(array.shape)), array.dtype.name, *ends))
    return draw_table(rows, head=("field", "shape", "dtype", "min", "max"))


def row_lines(
    dataset: BaseInput,
    batch: NestedMap,
    row: int,
    tokenizer: Tokenizer | None = None,
    *,
    style: Style = PLAIN,
) -> Iterator[str]:
    """Yield the text of each sequence of ids in a row, by segments, or else its numbers.

    `tokenizer` decodes the ids of an input that cannot decode them.
    """
    number = f" (example {batch.provenance[row]})" if "provenance" in batch else ""
    if not real_rows(batch)[row]:
        yield f"row {row}: padding"
        return
    yield f"row {row}{number}"
    sides = [*_sides(batch)]
    for path, value in batch.flatten_items() if not sides else ():
        if path not in ROW_MARKS:
            yield f"  {path}: {_numbers_text(np.asarray(value)[row])}"
    for side, part in sides:
        decode = _decoder(dataset, side or None, tokenizer)
        valid = _valid(part)
        length = part.ids.shape[1]
        here = np.ones(length, bool) if valid is None else valid[row]
        segments = part.segment_ids[row] if "segment_ids" in part else here.astype(np.int32)
        for segment in np.unique(segments[here]):
            where = here & (segments == segment)
            suffix = f"[{segment}]" if segments.max(initial=0) > 1 else ""
            prefix = f"{side}." if side else ""
            text = [(False, decode(part.ids[row][where]))]
            yield f"  {prefix}ids{suffix}: {_shown(text, style._replace(unweighted='{}'))}"
            if "labels" in part and "weights" in part:
                runs = _runs(part.weights[row][where] > 0, part.labels[row][where])
                text = [(is_weighted, decode(piece)) for is_weighted, piece in runs]
                yield f"  {prefix}labels{suffix}: {_shown(text, style)}"


def _numbers_text(x: np.ndarray) -> str:
    """Return up to a few numbers, or else the shape and statistics of many."""
    if x.size <= _NUMBERS_SHOWN:
        return " ".join(f"{number:.6g}" for number in x.ravel())
    return f"{list(x.shape)}, mean {x.mean():.6g}, standard deviation {x.std():.6g}"


def _sides(batch: NestedMap) -> Iterator[tuple[str, NestedMap]]:
    """Yield the parts of a batch that hold ids `[batch, length]`: itself, or `src` and `tgt`."""
    if "ids" in batch and np.ndim(batch.ids) == 2:
        yield "", batch
    for name in sorted(batch):
        part = batch[name]
        if isinstance(part, NestedMap) and "ids" in part and np.ndim(part.ids) == 2:
            yield name, part


def _valid(part: NestedMap) -> np.ndarray | None:
    """Return bool `[batch, length]`, True for tokens; None if the batch does not mark them."""
    if "paddings" in part:
        return np.asarray(part.paddings == 0)
    if "segment_ids" in part:
        return np.asarray(part.segment_ids > 0)
    if "prompt_lengths" in part:
        return np.arange(part.ids.shape[1]) < np.asarray(part.prompt_lengths)[:, None]
    return None


def _decoder(
    dataset: BaseInput, key: str | None, fallback: Tokenizer | None
) -> Callable[[np.ndarray], str]:
    """Return a function from ids to their text, with special ids marked by their names."""
    tokenizer = dataset.text_tokenizer(key)
    try:
        dataset.ids_to_strings(np.zeros((1, 0), np.int32), [0], key=key)
        has_vocabulary = True
    except NotImplementedError:
        tokenizer, has_vocabulary = fallback, False
    names = getattr(tokenizer, "special_tokens", {})

    def decode(ids: np.ndarray) -> str:
        if has_vocabulary:
            return dataset.ids_to_strings(ids[None], [len(ids)], key=key)[0]
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    def mark(ids: np.ndarray) -> str:
        return "".join(SPECIAL.format(names[token]) for token in ids.tolist())

    def text_of(ids: np.ndarray) -> str:
        runs = _runs(np.isin(ids, list(names)), ids)
        return "".join((mark if is_special else decode)(piece) for is_special, piece in runs)

    return text_of


def _runs(flags: np.ndarray, ids: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Yield consecutive ids with equal flags, with that flag."""
    begins = np.flatnonzero(np.diff(flags, prepend=~flags[:1]))
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        yield bool(flags[begin]), ids[begin:end]


def _shown(text: Iterable[tuple[bool, str]], style: Style) -> str:
    """Return pieces of a text in quotes on one line, without the middle of a long text.

    Args:
      text: Whether a piece counts for the loss, and the piece.
      style: Form of the pieces.
    """
    line = [
        (is_weighted, char)
        for is_weighted, piece in text
        for c in piece
        for char in (c if c.isprintable() else repr(c)[1:-1])
    ]
    if style.most_characters is not None and len(line) > style.most_characters:
        half = style.most_characters // 2
        line = [*line[:half], (True, " … "), *line[-half:]]
    forms = {True: style.weighted, False: style.unweighted}
    pieces = (
        forms[is_weighted].format("".join(char for _, char in chars))
        for is_weighted, chars in itertools.groupby(line, key=operator.itemgetter(0))
    )
    return f"“{''.join(pieces)}”"
