"""QK-clip uses the largest logits of the global batch, however rows and layers are split."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import Partial
from layerkit.errors import ConfigError
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.layers.transformer.stacks import StackedTransformer, StackedTransformerRepeated

REPEATED = StackedTransformerRepeated.HParams.config()
PIPELINED = PipelinedTransformer.HParams.config(num_stages=2, num_microbatches=2)
STACKED = re.compile(r"(pipeline/stage/)?repeat/sub/|layers_(?P<layer>\d)/")
HEADS = {f"lm/stack/attention/{name}/w" for name in ("query", "key")}


def joined(params: Any) -> dict[str, np.ndarray]:
    """Return all numbers of the two layers by the path of the weight in a layer."""
    lists: dict[str, Any] = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        lists.setdefault(STACKED.sub("", path), []).append(np.ravel(leaf))
    return {path: np.concatenate(parts) for path, parts in lists.items()}


def make_task(arrangements, stack=REPEATED, qk_clip=4.0, **learner):
    model = arrangements.language_model()
    model.lm_tpl.stack_tpl = stack.clone()
    model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.qk_clip = qk_clip
    return arrangements.sgd_task(model, **{"learning_rate": 0.01, **learner})


def run(arrangements, shape=(1, 1, 1), parts=1, label=0, **fields):
    """Return (structure of the state, change of the weights or their averages, scalars)."""
    batch = arrangements.unequal_batch()
    batch.labels[0, 0], batch.weights[0, 0] = label, 1.0
    task = make_task(arrangements, **fields)
    task.train.gradient_accumulation_steps = parts
    partitioner = arrangements.start(None if shape is None else list(shape), task)
    state = jax.device_get(jax.jit(task.init_state)(jax.random.key(0)))
    flat = flatten_dict(state.params, sep="/")
    for path, leaf in flat.items():  # Both layers start from the same weights.
        stacked, bare = STACKED.search(path), STACKED.sub("", path)
        size = leaf.size // (2 if stacked and not stacked["layer"] else 1)
        numbers = np.random.default_rng([*map(ord, bare)]).normal(size=size, scale=0.3)
        flat[path] = np.resize(numbers, leaf.shape).astype(np.float32)
    params = unflatten_dict(flat, sep="/")
    before, structure = joined(params), jax.tree.structure(state)
    state = state.replace(params=params, ema=params if state.ema else {})
    state = jax.device_put(state, partitioner.state_shardings(task))
    state, (_, scalars) = partitioner.train_step_fn(task)(state, partitioner.put_batch(batch))
    after = joined(jax.device_get(state.ema or state.params))
    return structure, {path: x - before[path] for path, x in after.items()}, scalars


@pytest.fixture(scope="module")
def whole(arrangements):
    return run(arrangements)


@pytest.mark.parametrize(
    "arranged",
    [
        pytest.param({"shape": (2, 2, 2)}, id="SPMD"),
        pytest.param({"shape": None}, id="pmap", marks=pytest.mark.slow),
        pytest.param({"stack": PIPELINED}, id="pipeline", marks=pytest.mark.slow),
        pytest.param(
            {"parts": 4, "stack": StackedTransformer.HParams.config()},
            id="4 microbatches, unrolled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_step_equals_that_of_one_device(arrangements, whole, arranged):
    _, changes, scalars = run(arrangements, **arranged)
    assert float(scalars["max_logit"]) == pytest.approx(float(whole[2]["max_logit"]), rel=1e-5)
    arrangements.assert_trees_close(changes, whole[1], rtol=1e-4, atol=1e-5)


def test_only_heads_change_and_the_state_has_the_same_tree(arrangements, whole):
    structure, changes, scalars = run(arrangements, qk_clip=None)
    assert structure == whole[0] and "max_logit" not in scalars
    differ = {k for k, x in changes.items() if not np.allclose(x, whole[1][k], atol=1e-6)}
    assert differ == HEADS and whole[2]["max_logit"] > 4.0
    norm = np.linalg.norm(np.concatenate([*whole[1].values()]))
    assert whole[2]["learning/applied_grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("label", "changed"), [(0, HEADS), (10**6, set())])
def test_averages_have_the_scaled_weights_of_valid_steps(arrangements, label, changed):
    _, changes, _ = run(arrangements, learning_rate=0.0, ema_decay=0.5, label=label)
    assert {path for path, change in changes.items() if np.abs(change).max() > 1e-3} == changed


def test_weights_that_cannot_be_scaled_are_errors(arrangements):
    def trace_step(**learner):
        task = make_task(arrangements, **learner)
        partitioner = arrangements.start(arrangements.one_device, task)
        batch = partitioner.abstract_batch(arrangements.unequal_batch())
        partitioner.train_step_fn(task).lower(partitioner.abstract_state(task), batch)

    with pytest.raises(ConfigError, match=r"attention/key/w.*qk_clip"):
        trace_step(frozen=(".*/key/w",))
    with pytest.raises(ConfigError, match="schedule-free"):
        trace_step(optimizer=Partial(optax.contrib.schedule_free_sgd))
