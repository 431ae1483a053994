"""The state before the first step: its values, their shardings and their record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from layerkit.config import Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers.quantization.lora import LORA_WEIGHTS, add_lora
from layerkit.models import LanguageModel, PreferenceModel, TransformerLm
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import plan_first_state
from layerkit_runner.optim.sharded_adafactor import ShardedAdafactorState, sharded_adafactor

OUT_OF_STACK = [
    (r"layers_([01])/(.*)", r"stack/sub/\2[\1]"),
    (r"layers_2/(.*)", r"stack/sub/\1[0]"),
]


def first_state(
    begin: Any, *sources: Any, model: Any = None, bound: Any = (), **fields: Any
) -> Any:
    """(partitioner, task, first state, its leaves) of a run that begins from these."""
    settings = begin.init_from(*sources, **fields)
    model = begin.model() if model is None else model
    partitioner, task = begin.bound(model, begin=settings, **dict(bound))
    first = plan_first_state(partitioner, task)()
    return partitioner, task, first, begin.leaves(first.state)


def weights(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in values.items() if name.startswith("params/")}


def assert_same(result: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)


@pytest.fixture(scope="module")
def drawn(begin: Any) -> dict[str, np.ndarray]:
    """The first state that a run draws."""
    return begin.leaves(plan_first_state(*begin.bound(begin.model()))().state)


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/checkpoint_00000007"])
def test_weights_of_a_job_are_copied_and_all_else_starts_anew(
    begin: Any, drawn: dict[str, np.ndarray], where: str
):
    *_, first, result = first_state(begin, begin.job / where)
    assert_same(weights(result), weights(begin.values))
    # Everything but the weights starts anew.
    others = drawn.keys() - weights(drawn).keys()
    assert_same({name: result[name] for name in others}, {name: drawn[name] for name in others})
    assert first.step == 0
    label = f"{begin.job}/checkpoints:7"
    names = [name.removeprefix("params/") for name in weights(result)]
    assert first.provenance.weights == {name: f"{label}:params/{name}" for name in names}
    count = len(names)
    assert list(first.provenance.lines()) == [f"init from    {count} weights from {label}"]


@pytest.mark.parametrize("one_file", [False, True], ids=["tensorstore", "msgpack"])
@pytest.mark.parametrize("arrangement", ["2 x 2 x 2", "pmap"])
def test_state_of_either_format_is_restored_on_any_mesh(
    begin: Any, tmp_path: Path, one_file: bool, arrangement: str
):
    job = begin.job
    if one_file:
        job = tmp_path
        begin.save(job, begin.filled_state(begin.model(), pmap=True), one_file=True)
    place = {"pmap": True} if arrangement == "pmap" else {"shape": [2, 2, 2]}
    source = {"folder": str(job), "opt_state_rules": [(".*", r"\g<0>")], "load_step": True}
    partitioner, task, first, result = first_state(begin, source, bound=place)
    assert_same(result, {**begin.values, "step": np.int32(7)})
    required = partitioner.state_shardings(task)
    assert jax.tree.map(lambda leaf: leaf.sharding, first.state) == required


@pytest.mark.parametrize("repeated", [True, False], ids=["whole", "in layers"])
def test_values_are_read_into_the_shardings_of_the_state(begin: Any, repeated: bool):
    from layerkit_runner.init_from import first_state as module
    from layerkit_runner.init_from.matching import match
    from layerkit_runner.init_from.sources import Opened, StoredCheckpoint

    rules = None if repeated else [*OUT_OF_STACK[:1], (".*", r"\g<0>")]
    settings = begin.init_from({"folder": str(begin.job), "rules": rules})
    model = begin.model(repeated=repeated)
    partitioner, task = begin.bound(model, [1, 4, 2], begin=settings)
    stored = StoredCheckpoint(begin.job / "checkpoints", step=None, report=print)
    state = partitioner.abstract_state(task)
    matched = match(settings, [Opened(settings.sources[0], stored)], state, model=task.model)
    read = stored.read(module._stored_specs(stored, matched.values.values()))
    path = ("params", "stack", "sub", "linear", "w")
    shards = {shard.data.shape for shard in read[path].addressable_shards}
    assert read[path].shape == (2, 8, 8)
    assert shards == {(2, 2, 4)}  # an eighth on each device


def test_optimizer_values_without_a_rule_start_anew(begin: Any, drawn: dict[str, np.ndarray]):
    source = {"folder": str(begin.job), "opt_state_rules": [("0/nu/(.*)", r"0/nu/\1")]}
    *_, first, result = first_state(begin, source)
    for name, value in result.items():
        if name.startswith("opt_state"):
            expected = begin.values if "/nu/" in name else drawn
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    moments = sum("opt_state/0/nu" in name for name in result)
    total = sum(name.startswith("opt_state") for name in result)
    told = list(first.provenance.lines())[-1].strip()
    assert told == f"{moments} of {total} values of the optimizer state; the others are initialized"


def test_loaded_step_advances_schedules_but_not_moments(begin: Any):
    source = {"folder": str(begin.job), "load_step": True}
    *_, first, _ = first_state(begin, source)
    assert first.step == int(first.state.step) == 7
    adam, schedule = first.state.opt_state
    assert (int(adam.count), int(schedule.count)) == (0, 7)
    assert isinstance(schedule, optax.ScaleByScheduleState)
    told = list(first.provenance.lines())[-1].strip()
    assert told == f"step count continues from {begin.job}/checkpoints:7"


def test_loaded_step_advances_the_schedule_of_sharded_adafactor(begin: Any):
    source = {"folder": str(begin.job), "load_step": True}
    optimizer = {"optimizer": Partial(sharded_adafactor)}
    _, task, first, _ = first_state(begin, source, bound=optimizer)
    states = jax.tree.leaves(
        first.state.opt_state, is_leaf=lambda node: isinstance(node, ShardedAdafactorState)
    )
    assert {int(jnp.max(state.count)) for state in states} == {0}
    assert {int(jnp.min(state.schedule.count)) for state in states} == {7}
    zeros = jax.tree.map(jnp.zeros_like, first.state.params)
    state = first.state
    with task.declared_weights() as stacks:

        @jax.jit
        def rate_of(state: Any) -> Any:
            update = task.train.learner.update(
                zeros, state.opt_state, state.params, step=state.step, stacks=stacks
            )
            return update.scalars["learning/lr"]

        rate = float(rate_of(state))
    (schedule, *_) = (state.schedule for state in states)
    assert rate == pytest.approx(float(task.train.learner.learning_rate(jnp.max(schedule.count))))


def test_averages_in_place_of_weights(begin: Any, tmp_path: Path):
    state = begin.filled_state(begin.model())
    # Frozen weights have no average; they come as they are.
    ema = begin.filled(state.params, seed=1)
    del ema["head"]
    begin.save(tmp_path, {"params": state.params, "ema": ema, "step": state.step})
    *_, first, result = first_state(begin, {"folder": str(tmp_path), "use_ema": True})
    expected = {**begin.leaves({"params": state.params}), **begin.leaves({"params": ema})}
    assert_same(weights(result), expected)
    origins = first.provenance.weights
    assert origins["head/w"].endswith(":7:params/head/w")
    assert origins["stack/sub/bias/b"].endswith(":7:ema/stack/sub/bias/b")


def test_averages_begin_with_the_weights(begin: Any):
    *_, result = first_state(begin, begin.job, bound={"ema_decay": 0.9})
    for name, value in weights(begin.values).items():
        np.testing.assert_array_equal(result[name.replace("params/", "ema/", 1)], value)


def test_floats_are_converted_and_reported(begin: Any):
    model = begin.model()
    model.dtype = jnp.bfloat16
    *_, first, result = first_state(begin, begin.job, model=model)
    for name, value in weights(result).items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value, begin.values[name].astype(jnp.bfloat16))
    count = len(weights(begin.values))
    told = list(first.provenance.lines())[-1].strip()
    assert told == f"float32 → bfloat16: {count} values converted"


@pytest.mark.parametrize("shape", [None, [2, 2, 2]], ids=["one device", "2 x 2 x 2"])
def test_rules_split_a_stack_into_layers(begin: Any, shape: Any):
    rules = [*OUT_OF_STACK, (".*", r"\g<0>")]
    model = begin.model(num_layers=3, repeated=False)
    source = {"folder": str(begin.job), "rules": rules}
    *_, result = first_state(begin, source, model=model, bound={"shape": shape})
    expected = {"params/head/w": begin.values["params/head/w"]}
    for leaf in ("linear/w", "bias/b"):
        stacked = begin.values[f"params/stack/sub/{leaf}"]
        for here, there in enumerate((0, 1, 0)):
            expected[f"params/layers_{here}/{leaf}"] = stacked[there]
    assert_same(weights(result), expected)


@pytest.mark.parametrize("shape", [None, [2, 2, 2]], ids=["one device", "2 x 2 x 2"])
def test_rules_fill_a_deeper_stack_from_chosen_layers(begin: Any, shape: Any):
    rules = [(r"stack/.*", r"\g<0>[0, 1, 1, 0]"), (".*", r"\g<0>")]
    model = begin.model(num_layers=4)
    source = {"folder": str(begin.job), "rules": rules}
    *_, result = first_state(begin, source, model=model, bound={"shape": shape})
    for name, value in weights(result).items():
        expected = begin.values[name]
        if "/stack/" in name:
            expected = expected[[0, 1, 1, 0]]
        np.testing.assert_array_equal(value, expected, err_msg=name)


def test_rules_stack_layers(begin: Any, tmp_path: Path):
    state = begin.filled_state(begin.model(repeated=False))
    begin.save(tmp_path, state)
    rules = [(r"stack/sub/(.*)", r"layers_{layer}/\1"), (".*", r"\g<0>")]
    source = {"folder": str(tmp_path), "rules": rules}
    *_, result = first_state(begin, source, bound={"shape": [2, 2, 2]})
    there = begin.leaves(state)
    expected = {"params/head/w": there["params/head/w"]}
    for leaf in ("linear/w", "bias/b"):
        layers = [there[f"params/layers_{i}/{leaf}"] for i in (0, 1)]
        expected[f"params/stack/sub/{leaf}"] = np.stack(layers)
    assert_same(weights(result), expected)


def test_adapters_on_a_pretrained_model(begin: Any):
    model = add_lora(begin.model(), rank=2)
    place = {"shape": [2, 2, 2], "trainable": (LORA_WEIGHTS,)}
    partitioner, task, first, before = first_state(begin, begin.job, model=model, bound=place)
    adapters = {name for name in weights(before) if "lora_" in name}
    base = {name: value for name, value in weights(before).items() if name not in adapters}
    assert_same(base, weights(begin.values))
    drawn = {n for n, origin in first.provenance.weights.items() if origin == "random_init"}
    assert drawn == {name.removeprefix("params/") for name in adapters}
    assert all(np.any(before[name]) == name.endswith("lora_a") for name in adapters)
    # A step: the base keeps its bits, the adapters learn.
    rng = np.random.default_rng(0)
    batch = NestedMap(x=rng.normal(size=(8, 8)), y=rng.normal(size=(8, 4))).transform(np.float32)
    step = partitioner.train_step_fn(task)
    after, _ = step(first.state, partitioner.put_batch(batch))
    moved = {n for n, value in weights(begin.leaves(after)).items() if np.any(value != before[n])}
    assert moved
    assert moved <= adapters


def test_first_source_with_a_weight_provides_it(begin: Any, tmp_path: Path):
    """`draw` takes precedence over all sources."""
    state = begin.filled(begin.filled_state(begin.model()), seed=3)
    head = {"params": {"head": state.params["head"]}}
    begin.save(tmp_path, head)
    base = {"folder": str(begin.job), "ignore": ("head/.*",)}
    *_, result = first_state(begin, tmp_path, base, draw=("stack/sub/bias/b",))
    expected = {**begin.values, **begin.leaves(head)}
    expected["params/stack/sub/bias/b"] = np.zeros((2, 8), np.float32)
    assert_same(weights(result), weights(expected))


def test_missing_weights_are_drawn_if_allowed(begin: Any, drawn: dict[str, np.ndarray]):
    source = {"folder": str(begin.job), "rules": [(r"stack/.*", r"\g<0>")]}
    *_, result = first_state(begin, source, missing="draw")
    for name, value in weights(result).items():
        origin = begin.values if "/stack/" in name else drawn
        np.testing.assert_array_equal(value, origin[name], err_msg=name)


def test_state_whose_weights_are_all_drawn_equals_that_without_a_source(
    begin: Any, drawn: dict[str, np.ndarray]
):
    *_, first, result = first_state(begin, begin.job, draw=(".*",))
    assert_same(result, drawn)
    assert list(first.provenance.lines()) == [
        f"init from    3 initialized randomly ({', '.join(first.provenance.weights)})"
    ]


def test_record_of_a_fresh_start(begin: Any, tmp_path: Path):
    source = {"folder": str(begin.job), "load_step": True}
    *_, first, _ = first_state(begin, source, draw=("head/.*",))
    first.provenance.write(epath.Path(tmp_path))
    record = json.loads((tmp_path / "initial_values.json").read_text())
    assert record["step"] == f"{begin.job}/checkpoints:7"
    assert record["opt_state"] == {}
    assert record["weights"]["head/w"] == "random_init"
    bias = "stack/sub/bias/b"
    assert record["weights"][bias] == f"{begin.job}/checkpoints:7:params/{bias}"


def test_damaged_checkpoint_is_skipped_or_an_error(begin: Any, tmp_path: Path):
    partitioner, task = begin.bound(begin.model())
    state = begin.filled(partitioner.abstract_state(task))
    for step in (3, 5):
        begin.save(tmp_path, state, step=step, one_file=True)
    file = tmp_path / "checkpoints" / "checkpoint_00000005" / "state" / "state.msgpack"
    file.write_bytes(file.read_bytes()[:-1])
    told: list[str] = []
    task.initial_weights = begin.init_from(tmp_path)
    first = plan_first_state(partitioner, task, report=told.append)()
    assert first.provenance.weights["head/w"].startswith(f"{tmp_path}/checkpoints:3:")
    assert "CHECKPOINT DAMAGED: step 5" in told[0]
    task.initial_weights = begin.init_from({"folder": str(tmp_path), "step": 5})
    with pytest.raises(UsageError, match=r"checkpoint_00000005.*\n.*state/state.msgpack"):
        plan_first_state(partitioner, task)


@pytest.mark.parametrize("draw", [(), ("lm/softmax/.*",)], ids=["loaded", "partly drawn"])
def test_first_state_of_dpo_has_reference_equal_to_policy(
    begin: Any, tmp_path: Path, draw: tuple[str, ...]
):
    lm = TransformerLm.HParams.config(
        vocab_size=11, model_dims=8, hidden_dims=8, num_layers=1, num_heads=2
    )
    base = begin.filled_state(LanguageModel.HParams.config(lm_tpl=lm))
    begin.save(tmp_path, base)
    model = PreferenceModel.HParams.config(lm_tpl=lm)
    frozen = {"frozen": ("reference_lm/.*",)}
    *_, first, result = first_state(begin, tmp_path, model=model, bound=frozen, draw=draw)
    params = {name.removeprefix("params/"): value for name, value in weights(result).items()}
    policy = {name: value for name, value in params.items() if name.startswith("lm/")}
    assert_same(params, policy | {f"reference_{name}": value for name, value in policy.items()})
    stored = begin.leaves(base)
    for name, value in policy.items():
        is_drawn = bool(draw) and name.startswith("lm/softmax/")
        assert np.array_equal(value, stored[f"params/{name}"]) != is_drawn, name
    origins = first.provenance.weights
    assert {origins[f"reference_{name}"] for name in policy} == {f"copy_of:{n}" for n in policy}
    (line,) = first.provenance.lines()
    assert line.endswith(f"{len(policy)} copied (reference_lm from lm)")
