"""Translation of Pax's experiment classes to experiments of this project.

The tables are in `translate.yml` of the package of the experiments, since they name its fields and
recipes. Keys without a row are listed as not translated, with the source line and the reason.
"""
