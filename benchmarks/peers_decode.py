"""Compare cached greedy decoding of a Hugging Face folder: layerkit and transformers on PyTorch.

Both load the same LLaMA of random weights and continue the same prompts; the ids must be equal. The
processes take turns, as in `peers.py`; a step is one call that continues all rows.

    python -m venv torch && torch/bin/pip install torch==2.13.0 transformers
    python benchmarks/peers_decode.py --torch=torch/bin/python
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import print_table, read, serve, start, take_turns

SIZES = {"vocab": 512, "dims": 512, "layers": 8, "heads": 8, "mlp": 2048, "rows": 8}
SIZES |= {"prompt": 64, "new": 128}


def prompts(sizes: dict[str, int]) -> np.ndarray:
    """Return prompts of random ids, int `[rows, prompt]`."""
    shape = (sizes["rows"], sizes["prompt"])
    return np.random.default_rng(0).integers(3, sizes["vocab"], shape)


def transformers_step(folder: Path, sizes: dict[str, int]) -> Callable[[], Any]:
    """Write the model to the folder; return a function that continues the prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes["vocab"],
            hidden_size=sizes["dims"],
            intermediate_size=sizes["mlp"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            max_position_embeddings=sizes["prompt"] + sizes["new"],
            initializer_range=0.2,  # so that the largest logit is clear
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    ids, new = torch.tensor(prompts(sizes)), sizes["new"]
    mask = torch.ones_like(ids)

    def step() -> Any:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0
            )
        return out[:, ids.shape[1] :].tolist()

    return step


def layerkit_step(folder: Path, sizes: dict[str, int]) -> Callable[[], Any]:
    """Load the model of the folder; return a function that continues the prompts."""
    import layerkit_runner

    model, ids = layerkit_runner.load(str(folder)), prompts(sizes)

    def step() -> Any:
        result = model.generate_ids(list(ids), max_new_tokens=sizes["new"], temperature=0.0)
        return np.asarray(result).tolist()

    return step


def main() -> None:
    """Compare both and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="Python interpreter with transformers")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in SIZES}
    if args.worker:
        make = {"layerkit": layerkit_step, "transformers": transformers_step}[args.worker]
        step = make(args.folder, sizes)
        serve(step, first=step())
        return
    given = [f"--{name}={value}" for name, value in sizes.items()]
    with tempfile.TemporaryDirectory() as folder:
        workers, ids = {}, {}
        for name, python in (("transformers", args.torch), ("layerkit", sys.executable)):
            command = [python, __file__, "--torch=", "--worker", name, "--folder", folder, *given]
            workers[name] = start(command)
            ids[name] = json.loads(read(workers[name]))
        if ids["layerkit"] != ids["transformers"]:
            raise SystemExit("the ids differ")
        print_table(take_turns(workers, turns=args.turns, steps=1))


if __name__ == "__main__":
    main()
