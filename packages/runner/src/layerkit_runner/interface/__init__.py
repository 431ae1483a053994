"""The Python interface: functions that train, load and call models from a notebook or a script.

`layerkit_runner` exports the public names. The command line calls the same modes and programs.
"""
