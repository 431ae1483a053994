"""DistillationModel: a language model that learns from the distributions of a teacher.

On-policy, the student learns on its own continuations of the data, as in GKD (Agarwal et al., 2024,
arXiv:2306.13649). `layerkit.ops.losses.distillation` defines the divergences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import INTERMEDIATES, NON_TRAINABLE, PARAMS, RANDOM, BaseLayer
from layerkit.base.base_model import NATS_PER_TOKEN, Metrics, WeightedScalar
from layerkit.base.step_reports import REPORTS
from layerkit.base.weights import is_box
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_positive, require
from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import Linear
from layerkit.layers.transformer.transformer import drop_none
from layerkit.models.language_model import DecodedLm
from layerkit.models.weighted_metrics import token_metrics
from layerkit.ops.losses.distillation import divergence, top_divergence
from layerkit.ops.losses.softmax import weighted_mean

TEACHER_WEIGHTS = "teacher/(.*)"
"""Pattern of the paths of the teacher's weights."""


class DistillationModel(DecodedLm):
    """A language model, the student, that is trained towards a teacher.

    A batch is that of `LanguageModel`. The loss of a token is α·divergence + (1 − α)·cross-entropy,
    and that of a sampled token is its divergence. A sharding rule `teacher_embed` replaces `embed`
    for the weights of the teacher, and so for other axes.

    Attributes:
      teacher_tpl: Network of the teacher, whose weights, `teacher/`, are not trained. None
        reads the results of `top_log_probs` in the batch: `teacher_ids` `[batch, length, k]` and
        `teacher_log_probs` `[batch, length, k + 1]`.
      num_ids: Number of ids that both vocabularies have, which are compared. None for the smaller
        of the two.
      beta: β of `layerkit.ops.losses.distillation`, from 0 to 1.
      temperature: Divisor of the logits of both networks in the divergence.
      alpha: α, from 0 to 1.
      on_policy_fraction: Probability that a training step, or microbatch, learns from samples of
        the student. With `decoder`, they continue each row up to its first label with a weight.
      prompt_length: Number of first tokens of rows whose first label has a weight. Rows without a
        weight in so many labels have no sample.
      features: Pairs of a layer of the student, whose outputs learn through a linear map, and the
        layer of the teacher whose outputs they learn; both count from 0.
      feature_weight: Factor of the mean squared distance of features in the loss.

    Raises:
      ConfigError: A number is out of range, or `teacher_tpl` is needed and None.
    """

    used_only_if: ClassVar[Conditions] = {
        "prompt_length": "on_policy_fraction",
        "feature_weight": "features",
    }
    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": NATS_PER_TOKEN}

    teacher_tpl: Config[BaseLayer] | None = sub_config_field(None)
    num_ids: int | None = None
    beta: float = 0.0
    temperature: float = 1.0
    alpha: float = 1.0
    on_policy_fraction: float = 0.0
    prompt_length: int = 32
    features: tuple[tuple[int, int], ...] = ()
    feature_weight: float = 1.0

    def setup(self) -> None:
        """Check the fields, and create the networks and the maps of features."""
        check_positive(self, temperature=self.temperature, prompt_length=self.prompt_length)
        for name in ("alpha", "beta", "on_policy_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, self, name, value, "a number from 0 to 1")
        needs_network = bool(self.features) or self.on_policy_fraction > 0
        expected = "a network, since features and samples need one"
        require(self.teacher_tpl or not needs_network, self, "teacher_tpl", None, expected)
        super().setup()
        if self.teacher_tpl is not None:
            self.create_child("teacher", self.teacher_tpl, train=False)
        for layer, other in self.features:
            is_layer = 0 <= layer < self.lm.num_layers and 0 <= other < self.teacher.num_layers
            counts = f"{self.lm.num_layers} and {self.teacher.num_layers}"
            expected = f"numbers from 0 of layers of student and teacher, which have {counts}"
            require(is_layer, self, "features", (layer, other), expected)
            sizes = {"input_dims": self.lm.model_dims, "output_dims": self.teacher.model_dims}
            self.create_child(f"feature_{layer}", Linear.HParams.config(), **sizes)
        self._places = {
            name: [getattr(self, name).locate_layer(pair[side]) for pair in self.features]
            for side, name in enumerate(("lm", "teacher"))
        }

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """Regular expression of the paths of the teacher; empty if there is no such network."""
        return () if self.teacher_tpl is None else (TEACHER_WEIGHTS,)

    def init_boxed(self, *args: Any, **kwargs: Any) -> Any:
        """Initialize as `BaseModel.init_boxed`, with the teacher's names of logical axes."""
        variables = super().init_boxed(*args, **kwargs)
        rules = {} if self.sharding is None else dict(self.sharding.rules.table)

        def rename(box: Any) -> Any:
            names = {axis: f"teacher_{axis}" for axis in box.axes if f"teacher_{axis}" in rules}
            return box.replace(axes=tuple(names.get(axis, axis) for axis in box.axes))

        weights = dict(variables[PARAMS])
        if self.teacher_tpl is not None:
            weights["teacher"] = jax.tree.map(rename, weights["teacher"], is_leaf=is_box)
        return {**variables, PARAMS: weights}

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute the losses and weights of each token `[batch, length]`, and `is_sampled`."""
        rows, is_sampled = self._rows(batch)
        hidden, features = self._run("lm", rows)
        if self.teacher_tpl is None:
            teacher = [batch.teacher_ids, batch.teacher_log_probs]
        else:
            *teacher, targets = self._run("teacher", rows)
            head = jax.lax.stop_gradient(self.teacher.softmax.head())
        options = self.beta, self.temperature

        def compare(logits: jax.Array, *teacher: Any) -> jax.Array:
            if self.teacher_tpl is None:
                ids, log_probs = teacher
                return top_divergence(logits[..., : self.num_ids], ids, log_probs, *options)
            others = self.teacher.softmax.project(*teacher, head)
            size = self.num_ids or min(logits.shape[-1], others.shape[-1])
            return divergence(logits[..., :size], others[..., :size], *options)

        losses, per_token = self.lm.softmax.token_losses(hidden, rows.labels, compare, *teacher)
        result = NestedMap(losses._asdict(), divergence=per_token, weights=rows.weights)
        if self.features:
            maps = [getattr(self, f"feature_{layer}") for layer, _ in self.features]
            differences = [
                learn(x).astype(jnp.float32) - jax.lax.stop_gradient(y)
                for learn, x, y in zip(maps, features, targets, strict=True)
            ]
            result.feature_distance = sum(jnp.mean(x * x, -1) for x in differences) / len(maps)
        return NestedMap(result, is_sampled=is_sampled)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss`, `divergence`, `xent`, `accuracy`, and `feature_distance` with features.

        Training with samples, whose tokens are no data, leaves out `xent` and `accuracy`. The other
        results are those of `LanguageModel`.
        """
        weights = predictions.weights
        names = ("loss", "xent", "divergence", "feature_distance")
        means = {n: weighted_mean(predictions[n], weights) for n in names if n in predictions}
        total = jnp.sum(weights.astype(jnp.float32))
        per_token = {"per_token_xent": predictions.xent, "correct": predictions.correct}
        metrics, rows = token_metrics(NestedMap(means, total_weight=total, **per_token), weights)
        alpha = jnp.where(predictions.is_sampled, 1.0, self.alpha)
        loss = alpha * means["divergence"] + (1.0 - alpha) * means["loss"]
        means["loss"] = loss + self.feature_weight * means.get("feature_distance", 0.0)
        if self._samples:
            metrics = {}
        reported = {n: WeightedScalar.of(means[n], total) for n in means.keys() - {"xent"}}
        return metrics | reported, rows

    @property
    def _samples(self) -> bool:
        return self.on_policy_fraction > 0 and self.is_training

    def _rows(self, batch: NestedMap) -> tuple[NestedMap, jax.Array]:
        """Return the rows to learn from, and whether the student has sampled them."""
        names = ("ids", "labels", "weights", "segment_ids", "segment_pos", "images")
        rows = NestedMap({name: batch[name] for name in names if name in batch})
        if not self._samples:
            return rows, jnp.zeros((), bool)
        key, choice = jax.random.split(self.next_prng_key())
        length = batch.ids.shape[1]
        width = min(self.prompt_length, length)
        # The first labels without weight belong to the prompt, as the token before them. If there
        # are none, a prompt is at most as long as the tokens of a row with a weight.
        has_loss = batch.weights[:, :width] != 0
        masked = jnp.cumprod(~has_loss, axis=1, dtype=jnp.int32).sum(axis=1)
        lengths = jnp.where(
            masked == 0, has_loss.sum(axis=1), jnp.where(masked < width, masked + 1, 0)
        )
        images = drop_none(images=rows.get("images"))
        prompts = NestedMap(ids=batch.ids[:, :width], prompt_lengths=lengths, **images)
        steps = length + 1 - width
        decoder = dataclasses.replace(self.decoder, max_decode_steps=steps, max_length=None)
        model, variables = self.unbind()
        model, frozen = model.clone(train=False, decoder=decoder), jax.lax.stop_gradient(variables)

        def sample() -> NestedMap:
            outputs: Any = model.apply(frozen, prompts, rngs={RANDOM: key}, method="decode")
            positions = jnp.arange(length)[None]
            is_row = positions < outputs.lengths[:, None] - 1
            made = {
                "ids": outputs.ids[:, :-1],
                "labels": outputs.ids[:, 1:],
                "weights": is_row & (positions >= lengths[:, None] - 1),
                "segment_ids": is_row,
                "segment_pos": jnp.broadcast_to(positions, batch.ids.shape),
                **images,
            }
            return NestedMap({name: made[name].astype(rows[name].dtype) for name in rows})

        is_sampled = jax.random.bernoulli(choice, self.on_policy_fraction)
        return jax.lax.cond(is_sampled, sample, lambda: rows), is_sampled

    def _run(self, name: str, rows: NestedMap) -> tuple[jax.Array, list[jax.Array]]:
        """Return the inputs of a network's softmax, and its features."""
        network = getattr(self, name)
        # An unbound network reports nothing by itself: a teacher has no auxiliary losses.
        bare, variables = network.unbind()
        kept = [c for c in (NON_TRAINABLE, *REPORTS) if network.is_mutable_collection(c)]
        places = self._places[name]
        paths = {path for path, _ in places}
        hidden, updates = bare.apply(
            variables,
            rows.ids,
            **{key: rows[key] for key in ("segment_ids", "segment_pos", "images") if key in rows},
            rngs={RANDOM: self.next_prng_key()} if self.has_rng(RANDOM) else {},
            method="predictors",
            mutable=[INTERMEDIATES, *(kept if name == "lm" else ())],
            capture_intermediates=lambda at, method: method == "__call__" and at.path in paths,
        )
        outputs = flatten_dict(updates.pop(INTERMEDIATES, {}))
        is_complete = all((*path, "__call__") in outputs for path in paths)
        expected = "(), since a pipeline has no outputs of single layers"
        require(is_complete, self, "features", self.features, expected)
        for collection, tree in updates.items():
            for variable, value in tree.items():
                network.put_variable(collection, variable, value)
        return hidden, [outputs[*path, "__call__"][0][indices] for path, indices in places]
