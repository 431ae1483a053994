"""Sweeps: `runner --study=FILE` searches the fields of an experiment with Optuna.

A sweep is a folder: `study.json` says what is searched, `study.db` is Optuna's memory, and every
trial is an ordinary run, in a process of its own, in `trials/0007`. Whoever starts the command
again goes on with the sweep, and whoever starts it a second time beside the first takes part in it.

    study_file    what the FILE says, checked before anything is imported
    search_space  ranges and choices, as values of fields
    folder        the folder of a sweep: one sweep each, locks
    study         Optuna: samplers, pruners, storage; whose turn it is
    trial_run     one trial's process, followed by its metrics.jsonl
    trial_process that process itself
    sweep         the loop
    report        the table, sweep.json, what next
    picture       sweep.png

Only `study` and `report` import Optuna.
"""
