"""What experiments are put together from: base classes with fields, and functions that read them.

A recipe makes the config of a model, a learner, a partitioner or inputs from the fields of an
experiment. Recipes may import the other packages and each other, and no named experiment.
"""
