"""Hyperparameter search: `runner --study=FILE` searches fields of an experiment with Optuna.

    study_file    read and check the study file
    command       check the command against the experiment and the folder, then start the sweep
    trials        the folder of a sweep, and the process and metrics of each trial
    sweep         Optuna's study, and the loop over its trials
    report        the table and sweep.json

Each trial is an ordinary run in its own process and folder. All of
these import Optuna, an extra.
"""
