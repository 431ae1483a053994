"""Hyperparameter search with Optuna: `runner --study=FILE`. Each trial is an ordinary run."""
