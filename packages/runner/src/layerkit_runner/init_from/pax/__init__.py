"""Reads checkpoints that Paxml wrote, as values with the names and layouts of this project.

    folders.py      finds the steps in a folder and opens their arrays by name
    tree_text.py    the text in a msgpack file that names its arrays
    stored_pax.py   the values of a step by the names of a run

Nothing is unpickled or run. `layerkit.interop.praxis` maps the names and layouts of weights.
"""
