"""What language-model experiments are put together from: model, optimization, parallelism, data.

Each recipe stands once, as a mix-in of UPPER_CASE fields and one method; an experiment inherits the
recipes that it wants and changes values.
"""
