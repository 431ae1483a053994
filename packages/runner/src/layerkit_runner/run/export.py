"""`--mode=export`: writes a checkpoint of a job as a Hugging Face folder, or as StableHLO.

The weights are those that decoding uses, which are averaged ones if the task says so. Adapters
(LoRA) are merged into the weights, or become a folder of PEFT with `--adapters_only`. A model
trained on preferences (DPO) exports its policy.

StableHLO has compiled functions that need only JAX:

    DIR/signature.json         names, shapes and dtypes of the arguments, and facts about the model
    DIR/logits.stablehlo       a serialized `jax.export.Exported`, as is the next file
    DIR/generate.stablehlo
    DIR/weights.safetensors    first argument of both; no such file if the weights are baked in

The number of rows and their length are open. docs/serving.md has a program that calls them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export

from layerkit.base.base_layer import RANDOM
from layerkit.base.base_model import BaseModel
from layerkit.config import Config
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.errors import UserError, pip_install
from layerkit.interop.hugging_face import export_model
from layerkit.interop.peft import export_adapters
from layerkit.layers.quantization.lora import LORA_WEIGHTS
from layerkit_inputs.base.errors import MissingExtraError
from layerkit_inputs.chat.template import load_chat_template
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.init_from.sources import HuggingFaceFolder, recognize
from layerkit_runner.run.job import Job, choose_step, start_job
from layerkit_runner.run.model.generation import find_tokenizer
from layerkit_runner.run.programs import model_calls
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.train_state import recorded_from_adapters, recorded_hugging_face

# Platforms of one export, if the model was traced without kernels of one of them.
_PLATFORMS = ("cpu", "cuda", "tpu")
_GENERATE_DTYPES = {
    "lengths": jnp.int32,
    "max_new_tokens": jnp.int32,
    "temperature": jnp.float32,
    "top_k": jnp.int32,
    "top_p": jnp.float32,
}


def run_export(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Write the model of a checkpoint; return the exit code."""
    if options.export_dir is None:
        raise UsageError("--mode=export writes a folder", hint="Give one: --export_dir=DIR.")
    if options.adapters_only and options.export_format != "hugging_face":
        value, expected = options.export_format, "hugging_face, since --adapters_only is of PEFT"
        raise UsageError(field="--export_format", value=value, expected=expected)
    job = start_job("export", resolved, options)
    with contextlib.closing(job.observers):
        directory = options.restore_checkpoint_dir
        with job.checkpoints(read_only=True, directory=directory) as checkpoints:
            step = choose_step(checkpoints, options.only_restore_step)
            state = job.restore(checkpoints, step, for_training=False).state
        state = job.partitioner.stored_state(job.task, state)
        variables = job.task.decoded_variables(state)
        with as_usage_error(OSError, ImportError, UserError):
            if options.export_format == "stablehlo":
                export_stablehlo(
                    options.export_dir,
                    resolved.task.model,
                    job.task.model,
                    variables,
                    bakes_weights=options.bakes_weights,
                    facts={"experiment": resolved.name, "step": step},
                )
            elif options.adapters_only:
                export_adapters(
                    options.export_dir,
                    resolved.task.model,
                    variables,
                    base_folder=_tokenizer_folder(job),
                    modules_to_save=_changed_weights(job, variables),
                )
            else:
                export_model(
                    options.export_dir,
                    resolved.task.model,
                    variables,
                    tokenizer_folder=_tokenizer_folder(job),
                )
                _write_chat_template(job, options.export_dir)
        kind = "averaged weights" if job.task.train.decode_use_ema_states else "weights"
        job.observers.message(f"wrote the {kind} of step {step} to {options.export_dir}")
    return 0


def _changed_weights(job: Job, variables: Mapping[str, Any]) -> list[str]:
    """Return patterns of the weights besides LoRA that are not those of the base model."""
    trained = job.task.train.learner.trained_weights.select(variables["params"])
    names = [*flatten_dict(trained, sep="/"), *recorded_from_adapters(job.directory)]
    return [re.escape(one) for one in dict.fromkeys(names) if not re.fullmatch(LORA_WEIGHTS, one)]


def _tokenizer_folder(job: Job) -> str | None:
    """Return the Hugging Face folder with which a chain of jobs began; None if there is none.

    It is that of the experiment if no job has recorded one.
    """
    recorded = recorded_hugging_face(job.directory)
    sources = getattr(job.task.initial_weights, "sources", ())
    for folder in [source.folder for source in sources] if recorded is None else [recorded]:
        try:
            if isinstance(recognize(folder), HuggingFaceFolder):
                return str(folder)
        except UsageError as error:  # It may be deleted once training has begun.
            job.observers.message(f"exporting without a tokenizer: {error}")
    return None


def _write_chat_template(job: Job, folder: str) -> None:
    """Write the chat template of the training data, and the end tokens of the decoder."""
    name = job.resolved.experiment.chat_template()
    if name is None or jax.process_index():
        return
    template = load_chat_template(name, find_tokenizer(job.resolved, job.partitioner))
    path = epath.Path(folder)
    for replaced in path.glob("additional_chat_templates/*.jinja"):
        replaced.unlink()
    for variant, source in template.sources.items():
        file = "chat_template" if variant == "default" else f"additional_chat_templates/{variant}"
        (path / file).parent.mkdir(exist_ok=True)
        atomic_write(path / f"{file}.jinja", source)
    if not job.task.model.can_decode:  # A reward model ends no text.
        return
    defaults = path / "generation_config.json"
    content = json.loads(defaults.read_text()) if defaults.exists() else {}
    content["eos_token_id"] = list(job.task.model.decoder.eos_ids)
    atomic_write(defaults, json.dumps(content, indent=2) + "\n")


def export_stablehlo(
    folder: epath.PathLike,
    config: Config,
    model: BaseModel,
    variables: Mapping[str, Any],
    *,
    bakes_weights: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write the functions `logits` and `generate` of a language model.

    Args:
      folder: Folder to write; files of the same names are replaced.
      config: Config of the model.
      model: The model.
      variables: Variables of the model by collection.
      bakes_weights: True to put the weights into both functions, as constants.
      facts: Entries that `signature.json` has in addition; None for none.
    """
    for package in ["flatbuffers"] if bakes_weights else ["flatbuffers", "safetensors"]:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(
                f"--export_format=stablehlo needs the package {package}",
                hint=f"Install it: {pip_install('layerkit-runner', 'stablehlo')}",
            )
    is_causal = getattr(getattr(model, "lm_tpl", None), "is_causal", True) is not False
    is_decoder = hasattr(model, "lm_tpl") and model.can_decode and is_causal
    is_valid = is_decoder and not getattr(model, "is_prefix_lm", False)
    expected = f"a decoder-only language model, not a {type(model).__qualname__}"
    require(is_valid, None, "--export_format", "stablehlo", expected, UsageError)
    model = model.clone(sharding=None, train=False)
    leaves = flatten_dict(variables, sep="/")
    weights = {name: np.asarray(jax.device_get(x), order="C") for name, x in leaves.items()}
    decoder = model.decoder
    steps = decoder.max_decode_steps
    longest = model_calls.max_positions(config)
    is_valid, field = longest is None or steps < longest, "task.model.decoder.max_decode_steps"
    expected = f"less than {longest}, the number of positions of the model"
    require(is_valid, None, field, steps, expected, UsageError)
    prompts = _ids(longest, steps=steps)
    rows = prompts["lengths"].shape
    options = {name: jax.ShapeDtypeStruct(rows, kind) for name, kind in _GENERATE_DTYPES.items()}
    seed = jax.ShapeDtypeStruct((), jnp.int32)

    def logits(variables: Any, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        return model_calls.token_logits(model, variables, NestedMap(ids=ids, lengths=lengths))

    path = epath.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    signature: dict[str, Any] = {
        **(facts or {}),
        "jax": jax.__version__,
        "bakes_weights": bakes_weights,
        "eos_ids": list(decoder.eos_ids),
        "largest_max_new_tokens": steps,
        "functions": {},
    }
    for name, function, arguments in (
        ("logits", logits, _ids(longest)),
        ("generate", _generate(model), {**prompts, **options, "seed": seed}),
    ):
        exported = _export(name, function, weights, arguments, bakes_weights=bakes_weights)
        atomic_write(path / f"{name}.stablehlo", bytes(exported.serialize()))
        signature["functions"][name] = {
            "arguments": {key: _text(spec) for key, spec in arguments.items()},
            "outputs": jax.tree.map(_text, exported.out_avals),
            "platforms": list(exported.platforms),
        }
    if not bakes_weights:
        from safetensors.numpy import save

        atomic_write(path / "weights.safetensors", save(weights))
    atomic_write(path / "signature.json", json.dumps(signature, indent=2) + "\n")


def _generate(model: Any) -> Callable[..., Any]:
    decoder = model_calls.decoder_for(
        model,
        max_new_tokens=model.decoder.max_decode_steps,
        is_greedy=False,
        eos_id=model.decoder.eos_id,
    )

    def generate(variables: Any, *arguments: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        ids, lengths, max_new_tokens, temperature, top_k, top_p, seed = arguments
        batch = NestedMap(
            ids=ids,
            prompt_lengths=lengths,
            max_steps=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        outputs = model.clone(decoder=decoder).apply(
            variables, batch, rngs={RANDOM: jax.random.key(seed)}, method="decode"
        )
        return outputs.ids, outputs.lengths, outputs.log_probs

    return generate


def _export(
    name: str,
    function: Callable[..., Any],
    weights: Mapping[str, Any],
    arguments: Mapping[str, jax.ShapeDtypeStruct],
    *,
    bakes_weights: bool,
) -> export.Exported:
    def call_nested(flat: Mapping[str, Any], *rest: Any) -> Any:
        return function(unflatten_dict(flat, sep="/"), *rest)

    call: Callable[..., Any] = call_nested
    specs: list[Any] = list(arguments.values())
    if bakes_weights:
        constants = {key: jnp.asarray(value) for key, value in weights.items()}

        def call(*rest: Any) -> Any:
            return call_nested(constants, *rest)
    else:
        like = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in weights.items()}
        specs = [like, *specs]
    platform = jax.default_backend()
    platforms = _PLATFORMS if platform == "cpu" else None
    try:
        return export.export(jax.jit(call), platforms=platforms)(*specs)
    except (jax.errors.InconclusiveDimensionOperation, TypeError) as error:
        raise UsageError(
            f"cannot export {name} with an open number of rows: {str(error).splitlines()[0]}",
            field="--export_format",
            value="stablehlo",
            expected="a model without operations that need a known number of rows",
            hint="Use --export_format=hugging_face, or load the job folder from Python.",
        ) from error


def _ids(longest: int | None, *, steps: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
    limits = [] if longest is None else [f"t <= {longest - steps}"]
    rows, length = export.symbolic_shape("b, t", constraints=limits)
    return {
        "ids": jax.ShapeDtypeStruct((rows, length), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def _text(spec: Any) -> str:
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"
