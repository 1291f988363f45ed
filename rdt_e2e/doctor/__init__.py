"""Checks of a machine before a run: each says what it looked at, what it found, and the fix.

In: a `Host` (this machine, or a test's folder of files) and the configuration. Out: findings, and an exit
status. `finding.py` says what a check is, each theme has a module of them, `registry.py` lists them all,
`run.py` is the verb. Only `pair.py`, which measures between two nodes, needs Ray.
"""
