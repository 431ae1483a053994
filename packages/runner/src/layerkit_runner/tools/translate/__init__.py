"""Translation of configurations of Pax and MaxText to experiments of this project.

    __main__.py   the command: `python -m layerkit_runner.tools.translate`
    tables.py     map keys to fields by the tables of a package; write classes and commands
    pax.py        read constants of Pax's experiment classes from their source
    maxtext.py    read MaxText's YAML and `key=value` words

The tables are in `translate.yml` of the package of the experiments, since they name its fields and
recipes. Keys without a row are listed as not translated, with the source line and the reason.
"""
