"""What an experiment is, before anything runs: its layers and weights, its configs as a graph.

    built_layers.py       every layer with the values that it is built with
    parameter_table.py    every weight: shape, axes, sharding, how it starts; totals
    numbered_layers.py    paths of layers that are alike, as one
    config_graph.py       the tree of configs as a Mermaid diagram
    config_difference.py  the fields in which two configurations differ

Nothing is written, no weight is made, and no accelerator is touched.
"""
