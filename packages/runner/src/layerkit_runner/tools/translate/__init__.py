"""Configurations of MaxText and Pax as experiments of ours.

    written.py         a translation: fields, recipes, what was left over; as a class or a command
    maxtext.py         reads MaxText's YAML and `key=value` words
    maxtext_keys.py    what each key of MaxText means here
    pax.py             Pax's experiment classes, with all that they inherit
    pax_fields.py      what each field of Pax means here
    pax_source.py      reads classes from their source, without importing Pax
    pax_task.py        follows `task()`: what it sets, as paths from the task
    pax_settings.py    what each of these paths means here
    values.py          numbers, names and switches, of which nothing is guessed

What has no counterpart is never dropped in silence: it is told by name, with the reason.
`python -m layerkit_runner.tools.translate` is the command.
"""
