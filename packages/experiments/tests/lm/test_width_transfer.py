"""WIDTH_TRANSFER against the rules of the package mup, and activations over widths."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_experiments.lm.hybrid import HybridText
from layerkit_experiments.lm.moe import Glam126M64E
from layerkit_experiments.lm.nvidia import GLaM64B64EProxy, Grok
from layerkit_experiments.lm.open_models import DeepSeekV3
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.recipes.experts import MixtureOfExperts
from layerkit_experiments.recipes.language_model import untied_decoder
from layerkit_experiments.recipes.width_transfer import contracts_width, is_router, keeps_rate
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.step.metrics import GLOBAL_BATCH

# (standard deviation, rate, decay) at width 512 relative to width 64, of modules after
# set_base_shapes of mup 1.0.0 and in the groups of its MuAdamW: nn.Embedding, nn.Linear,
# nn.LayerNorm and MuReadout, whose output is multiplied by 1/8.
MUP = {
    "embedding": (1.0, 1.0, 1.0),
    "hidden": (8**-0.5, 1 / 8, 8.0),
    "norm": (0.0, 1.0, 1.0),
    "readout": (1.0, 1.0, 1.0),
}
READOUT_FACTOR = 1 / 8
ROLES = {
    "softmax/w": "readout",
    "embedding/w": "embedding",
    "position/w": "embedding",
    "scale": "norm",
    "b": "norm",
    "bias": "norm",
}


REDUCED = {"NUM_LAYERS": 2, "MODEL_DIMS": 32, "HIDDEN_DIMS": 64, "NUM_HEADS": 2}
REDUCED |= {"DIMS_PER_HEAD": 16, "VOCAB_SIZE": 259, "MAX_SEQ_LEN": 16}


class Untied(LocalText):
    """A decoder whose head does not share the embedding."""

    model = untied_decoder


def sized(
    width: int, base: int | None, cls: type[BaseExperiment] = LocalText, **fields: Any
) -> Any:
    fields = {"NUM_LAYERS": 1, "NUM_HEADS": 4, "NUM_KV_HEADS": 4, "MAX_SEQ_LEN": 16, **fields}
    fields |= {"LEARNING_RATE": 2e-3, "WEIGHT_DECAY": 0.1, "WARMUP_STEPS": 0}
    fields |= {"MODEL_DIMS": width, "HIDDEN_DIMS": 4 * width, "WIDTH_TRANSFER": base}
    return cls(MAX_STEPS=100, DIMS_PER_HEAD=None, **fields)


def boxes_of(task: Any) -> Any:
    return jax.jit(task.Instantiate().model.init_boxed)(jax.random.key(0))["params"]


def flat(tree: Any) -> dict[str, Any]:
    return {"/".join(path): leaf for path, leaf in flatten_dict(tree).items()}


def groups_of(learner: Any) -> dict[str, tuple[float, float]]:
    """The peak of the rate and the weight decay of the main and each auxiliary optimizer."""
    named = {"main": learner} | {one.name: one for one in learner.auxiliary_optimizers}
    return {n: (g.learning_rate.peak, g.optimizer.weight_decay) for n, g in named.items()}


FAN_IN = {"WEIGHT_INIT": "fan_in"}
XAVIER = {"WEIGHT_INIT": "xavier", "POSITIONS": "trainable", "NORM": "layer_norm"}
GAUSSIAN = {"INIT_STD": 0.02, "POSITIONS": "trainable", "SCALE_RESIDUAL_INIT": True}


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (LocalText, XAVIER),
        (Untied, GAUSSIAN),
        # The ordinary tests have each class once.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (LocalText, FAN_IN),
                (LocalText, GAUSSIAN),
                (Untied, FAN_IN),
                (Untied, XAVIER),
            )
        ),
    ],
)
def test_initial_scales_and_rates_are_those_of_mup(cls: type[BaseExperiment], fields: Any):
    tasks = [sized(width, 64, cls, **fields).task() for width in (64, 512)]
    narrow, wide = map(boxes_of, tasks)
    rates = {
        "hidden": groups_of(tasks[1].train.learner)["main"],
        "other": groups_of(tasks[1].train.learner)["width_free"],
    }
    is_hidden, is_other = flat(contracts_width(wide)), flat(keeps_rate(wide))
    for path, box in flat(wide).items():
        role = next((role for end, role in ROLES.items() if path.endswith(end)), "hidden")
        std, rate, decay = MUP[role]
        assert is_hidden[path] == (role == "hidden") == (not is_other[path]), path
        stds = [float(jnp.std(one.value)) for one in (flat(narrow)[path], box)]
        assert stds[1] == pytest.approx(std * stds[0], rel=0.06), path
        group = rates["hidden" if role == "hidden" else "other"]
        assert group == pytest.approx((2e-3 * rate, 0.1 * decay)), path
    assert groups_of(tasks[0].train.learner)["main"] == (2e-3, 0.1)
    lms = [task.model.lm_tpl for task in tasks]
    assert lms[1].softmax_tpl.logit_scale / lms[0].softmax_tpl.logit_scale == READOUT_FACTOR
    # 1/√16 at heads of 16, and 1/128 · √16 at heads of 128, as 1/d of muP.
    scales = [lm.stack_tpl.layer_tpl.attention_tpl.logit_scale for lm in lms]
    assert scales == pytest.approx([1 / 4, 4 / 128])


def test_the_base_width_trains_as_without_the_field():
    plain, based = (sized(64, base) for base in (None, 64))
    for one, other in zip(label_logits(plain), label_logits(based), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class Spectral(LocalText):
    """A decoder whose best rate of Muon does not depend on the width."""

    def learner(self) -> Config:
        learner = super().learner()
        learner.optimizer.scale = "spectral"
        return learner


@pytest.mark.parametrize(
    ("cls", "optimizer", "main"),
    [
        (LocalText, "muon", (1e-3, 0.2)),
        (Spectral, "muon", (2e-3, 0.1)),
        pytest.param(LocalText, "normuon", (1e-3, 0.2), marks=pytest.mark.slow),
    ],
)
def test_muon_divides_its_rate_by_the_root_and_routers_keep_adam(
    cls: type[BaseExperiment], optimizer: str, main: tuple[float, float]
):
    learner = sized(256, 64, cls, OPTIMIZER=optimizer).task().train.learner
    expected = {"main": main, "adamw": (2e-3, 0.1), "routers": (5e-4, 0.4)}
    result = groups_of(learner)
    assert result.keys() == expected.keys()
    for name, group in expected.items():
        assert result[name] == pytest.approx(group)
    model = Glam126M64E(**REDUCED).task().Instantiate().model
    weights = jax.eval_shape(model.init_boxed, jax.random.key(0))["params"]
    paths = [path for path, chosen in flat(is_router(weights)).items() if chosen]
    assert paths and all("router" in path or "gate" in path for path in paths)


def test_the_noise_of_routers_has_the_rate_of_routers():
    class Noisy(MixtureOfExperts, LocalText):
        ROUTER_NOISE = True

    noise = {
        path: x for path, x in flat(is_router(boxes_of(Noisy().task()))).items() if "noise" in path
    }
    assert noise and all(noise.values())


def label_logits(made: Any) -> tuple[jax.Array, jax.Array]:
    """Logits of the labels, float32 [8, 16], before and after four steps on one batch."""
    task = made.task().Instantiate()
    ids = jax.random.randint(jax.random.key(1), (8, 16), 3, 40)
    batch = NestedMap(ids=ids, labels=ids * 7 % 259, weights=jnp.ones((8, 16)))
    step = jax.jit(functools.partial(task.train_step, context=GLOBAL_BATCH))
    state = jax.jit(task.init_state)(jax.random.key(0))

    @jax.jit
    def logits(params: Any) -> jax.Array:
        result = task.model.apply({"params": params}, method=lambda m: m.lm.logits(ids))
        return jnp.take_along_axis(result, batch.labels[..., None], axis=-1)[..., 0]

    first = logits(state.params)
    for _ in range(4):
        state, _ = step(state, batch)
    return first, logits(state.params)


@pytest.mark.parametrize(
    ("optimizer", "widths"),
    [
        pytest.param("adamw", (64, 256), marks=pytest.mark.slow),
        pytest.param("adamw", (64, 128, 256, 512), marks=pytest.mark.slow),
        pytest.param("muon", (64, 256), marks=pytest.mark.slow),
    ],
)
def test_change_of_logits_is_flat_over_widths_only_with_the_field(
    optimizer: str, widths: tuple[int, ...]
):
    changes: dict[int | None, list[float]] = {64: [], None: []}
    for base, values in changes.items():
        for width in widths:
            first, last = label_logits(sized(width, base, OPTIMIZER=optimizer))
            values.append(float((last - first).mean()))
    assert max(changes[64]) / min(changes[64]) < 1.15, changes
    assert changes[None][-1] / changes[None][0] > 1.8, changes


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"SCALE_EMBEDDING": True}, "SCALE_EMBEDDING"),
        ({"OPTIMIZER": "soap"}, "optimizer"),
        ({"base": 0}, "WIDTH_TRANSFER"),
        ({"WEIGHT_INIT": "xavier_last_axes"}, "params_init"),
    ],
)
def test_what_no_rule_covers_raises(fields: Any, field: str, raises: Any):
    base = fields.pop("base", 64)
    with raises(ConfigError, field=field):
        sized(128, base, **fields).task()


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (DeepSeekV3, "WIDTH_TRANSFER"),
        (HybridText, "WIDTH_TRANSFER"),
        (Grok, "lm_tpl.softmax_tpl.logit_scale"),
        (GLaM64B64EProxy, "lm_tpl.softmax_tpl.logit_scale"),
    ],
    ids=["latent attention", "recurrent mixers", "Grok", "GLaM"],
)
def test_other_mixers_and_scaled_logits_have_no_rule(
    cls: type[BaseExperiment], field: str, raises: Any
):
    with raises(ConfigError, field=field):
        cls(WIDTH_TRANSFER=64).task()
