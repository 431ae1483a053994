"""Configurations of Pax and MaxText as experiments of this project.

    __main__.py   the command: `python -m layerkit_runner.tools.translate`
    tables.py     maps keys to fields by the tables of a package; writes classes and commands
    pax.py        reads constants of Pax's experiment classes from their source
    maxtext.py    reads MaxText's YAML and `key=value` words

The tables are `translate.yml` in the package of the experiments, since they name its fields and
recipes. What no table maps is listed as not translated, with the source line and the reason.
"""
