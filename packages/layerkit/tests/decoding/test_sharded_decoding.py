"""Decoding on eight devices equals decoding on one, and no device holds the whole cache."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.base.weights import is_box
from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.beam_search import BeamSearch
from layerkit.decoding.loop import SampleDecoder
from layerkit.decoding.speculative import SpeculativeDecoder
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax
from layerkit.layers.basic.positions import PositionalEmbedding, RotaryPositionalEmbedding
from layerkit.layers.transformer.multi_token import MultiTokenPrediction
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.models.language_model import LanguageModel
from layerkit.models.sequence_model import SequenceModel

VOCAB, BATCH, WIDTH, STEPS = 16, 8, 4, 4
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 2
KEY = jax.random.key(0)

DECODERS = {
    "greedy": SampleDecoder(max_decode_steps=STEPS, temperature=0.0),
    "samples": SampleDecoder(
        max_decode_steps=STEPS,
        num_samples=2,
        top_p=0.9,
        repetition_penalty=1.2,
        stop_sequences=((3, 4),),
    ),
    "beams": BeamSearch(max_decode_steps=STEPS, beam_size=2, num_results=2, eos_id=5),
}


@pytest.fixture(scope="module")
def bound():
    return BoundSharding(Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "fsdp", "tensor")))


@pytest.fixture(scope="module")
def model():
    config = LanguageModel.HParams.config()
    config.lm_tpl.set(
        vocab_size=VOCAB,
        model_dims=8,
        hidden_dims=12,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=KV_HEADS,
        stack_tpl=StackedTransformerRepeated.HParams.config(),
    )
    attention = config.lm_tpl.stack_tpl.layer_tpl.attention_tpl
    attention.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    return config.Instantiate()


@pytest.fixture(scope="module")
def variables(model):
    return random_weights(model)


def prompts():
    ids = np.random.default_rng(5).integers(1, VOCAB, (BATCH, WIDTH)).astype(np.int32)
    return NestedMap(ids=ids, prompt_lengths=np.array([4, 1, 2, 3, 0, 2, 4, 1], np.int32))


@pytest.fixture(scope="module")
def split_rows():
    """A mesh that splits whole rows in two."""
    return BoundSharding(Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "tensor", "context")))


def random_weights(model):
    random = np.random.default_rng(7)

    def draw(path, weight):
        # A random bias of the last norm would say the same tokens over and over.
        deviation = 0.0 if "bias" in jax.tree_util.keystr(path) else 0.6
        return random.normal(0.0, deviation, weight.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, KEY))


def decode_of(model, decoder):
    model = model.clone(decoder=decoder)
    return lambda variables, batch: model.apply(
        variables, batch, method="decode", rngs={"random": jax.random.key(3)}
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "beams")) for n in DECODERS]
)
def test_decoding_with_a_sharded_cache_equals_one_device(bound, model, variables, name):
    program = check_on_mesh(bound, model, variables, DECODERS[name], prompts())
    check_cache(program, num_rows=BATCH * (1 if name == "greedy" else 2))


@pytest.mark.slow  # attention's own tests have single tokens on rows that are split
@pytest.mark.parametrize(("name", "width"), [("greedy", WIDTH - 1), ("beams", 1)])
def test_sharded_rows_may_have_any_length(split_rows, model, variables, name, width):
    batch = prompts()
    batch.ids = batch.ids[:, :width]
    check_on_mesh(split_rows, model, variables, DECODERS[name], batch)


@pytest.mark.slow
def test_decoding_under_sequence_parallelism_equals_one_device(bound, model, variables):
    rules = DEFAULT_RULES.replace(residual_length=("context", "tensor"))
    batch, sharding = prompts(), BoundSharding(bound.mesh, rules)
    batch.ids = batch.ids[:, : WIDTH - 1]
    check_on_mesh(sharding, model, variables, DECODERS["greedy"], batch)


@pytest.mark.slow  # test_multi_token.py has drafts on one device
@pytest.mark.parametrize(("mesh", "width"), [("bound", WIDTH), ("split_rows", WIDTH - 1)])
def test_drafts_on_eight_devices_equal_those_of_one(request, model, mesh, width):
    drafting = model.clone(lm_tpl=model.lm_tpl.clone().set(mtp_tpl=Config(MultiTokenPrediction)))
    batch, decoder = prompts(), SpeculativeDecoder(max_decode_steps=STEPS)
    batch.ids = batch.ids[:, :width]
    bound = request.getfixturevalue(mesh)
    check_on_mesh(bound, drafting, random_weights(drafting), decoder, batch)


@pytest.mark.slow
def test_sharded_sources_may_have_any_length(split_rows):
    config = SequenceModel.HParams.config(start_id=1)
    config.model_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_heads=2)
    config.model_tpl.position_tpl = PositionalEmbedding.HParams.config()
    config.model_tpl.embedding_tpl = Embedding.HParams.config()
    config.model_tpl.softmax_tpl = FullSoftmax.HParams.config()
    model = config.Instantiate()
    variables = random_weights(model)
    ids = np.random.default_rng(5).integers(1, VOCAB, (BATCH, 5)).astype(np.int32)
    lengths = np.array([5, 1, 2, 3, 0, 2, 4, 1])[:, None]
    paddings = (np.arange(5) >= lengths).astype(np.float32)
    batch = NestedMap(src=NestedMap(ids=ids, paddings=paddings))
    check_on_mesh(split_rows, model, variables, DECODERS["greedy"], batch, min_tokens=4)


def check_on_mesh(bound, model, variables, decoder, batch, *, min_tokens=5):
    """Compare eight devices with one; return the program of the eight."""
    expected = jax.jit(decode_of(model, decoder))(variables, batch)
    boxed = jax.eval_shape(model.init_boxed, KEY)
    places = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    axes = tuple(axis for axis in ("data", "fsdp") if axis in bound.mesh.shape)
    rows = NamedSharding(bound.mesh, PartitionSpec(axes))
    run = jax.jit(decode_of(model.clone(sharding=bound), decoder), in_shardings=(places, rows))
    compiled = run.lower(variables, batch).compile()
    result = compiled(jax.device_put(variables, places), jax.device_put(batch, rows))
    names = jax.tree.leaves(jax.tree_util.tree_map_with_path(lambda p, _: str(p[-1]), expected))
    for leaf, a, b in zip(names, jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        if "ids" in leaf or "lengths" in leaf:
            np.testing.assert_array_equal(a, b, err_msg=leaf)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=leaf)
    assert len(set(np.asarray(expected.ids)[:, -STEPS:].ravel())) >= min_tokens
    return compiled.as_text()


def check_cache(program, *, num_rows):
    """In the loop a device holds its rows and heads: a quarter and a half."""
    slots = WIDTH + STEPS
    mine = f"f32[{LAYERS},{num_rows // 4},{KV_HEADS // 2},{slots},{HEAD_DIM}]"
    loops = [line for line in program.splitlines() if re.search(r" while\(", line)]
    assert sum(line.count(mine) >= 2 for line in loops) >= 1  # keys and values
    # Rows of other devices, or other heads, are nowhere. A bitcast drops dimensions of size 1.
    program = "\n".join(line for line in program.splitlines() if " bitcast(" not in line)
    shapes = re.findall(rf"f32\[(?:{LAYERS},)?(\d+),(\d+),{slots},{HEAD_DIM}\]", program)
    assert shapes
    assert {int(heads) for _, heads in shapes} == {KV_HEADS // 2}
    assert max(int(held) for held, _ in shapes) == num_rows // 4
