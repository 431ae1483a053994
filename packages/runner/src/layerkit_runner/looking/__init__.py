"""What an experiment is, before anything runs: its weights, its configs as a graph, differences.

    parameter_table.py    every weight: shape, axes, sharding, how it starts; totals
    config_graph.py       the tree of configs as a Mermaid diagram
    config_difference.py  the fields in which two configurations differ

Nothing is written, no weight is made, and no accelerator is touched.
"""
