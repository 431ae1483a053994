"""Views of an experiment before it runs: configuration, layers, weights, graph and batches.

Nothing is written, no weight is made, and no accelerator is used.
"""

from __future__ import annotations

from layerkit_runner.config.config_text import printed_config
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.run_options import RunOptions


def run_inspect(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Print the view that `--inspect` names and return the exit code.

    Raises:
      UsageError: Fields or flags do not fit together.
    """
    # Each view imports JAX or NumPy as late as it needs them.
    if options.inspect == "batches":
        from layerkit_runner.tools.inspect.batches import print_batches

        print_batches(resolved, options)
        return 0
    if options.inspect == "layers":
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
