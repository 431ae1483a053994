"""Hyperparameter search: `runner --study=FILE` searches fields of an experiment with Optuna.

    study_file    read and check the FILE
    command       check the command against the experiment and the folder, then start the sweep
    trials        the folder of a sweep, and the process and metrics of each trial
    sweep         Optuna's study, and the loop over its trials
    report        the table, sweep.json and sweep.png

Every trial is an ordinary run in a process and folder of its own. Only `sweep` and `report` import
Optuna.
"""
