"""A model with weights that scores and continues texts, for Python, tools and programs."""
