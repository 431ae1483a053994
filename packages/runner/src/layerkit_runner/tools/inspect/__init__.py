"""What an experiment is, before anything runs: its layers and weights, its configs as a graph.

    built_layers.py       every layer with the values that it is built with
    parameter_table.py    every weight: shape, axes, sharding, first value; totals
    batches.py            a few batches of each input
    config_graph.py       the tree of configs as a Mermaid diagram
    config_difference.py  the fields in which two configurations differ

Nothing is written, no weight is made, and no accelerator is touched.
"""

from __future__ import annotations

from layerkit_runner.config.config_text import printed_config
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.run_options import RunOptions


def run_inspect(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Print what `--inspect` names; return the exit code.

    Raises:
      UsageError: Fields or flags do not fit together.
    """
    if options.inspect == "batches":
        # Loads NumPy, JAX and what the inputs stand on.
        from layerkit_runner.tools.inspect.batches import run_inspect

        return run_inspect(resolved, options)
    if options.inspect == "layers":
        # Likewise, and the model is built of shapes.
        from layerkit_runner.tools.inspect.built_layers import describe_layers

        text = describe_layers(resolved, options)
    elif options.inspect == "parameters":
        from layerkit_runner.tools.inspect.parameter_table import describe_parameters

        text = describe_parameters(resolved, options)
    elif options.inspect == "graph":
        from layerkit_runner.tools.inspect.config_graph import config_graph, mermaid

        text = mermaid(config_graph(resolved))
    else:
        text = printed_config(resolved, None, mode="inspect", as_json=options.json)
    print(text, flush=True)
    return 0
