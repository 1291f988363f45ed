"""Measuring a sync against what the hardware allows and against vLLM's own ways of doing it.

In: a profile and a synthetic checkpoint with Kimi K2's widths (`k2_slice.py`). Out: one table and one
JSON file. `run.py` gives each row a process of its own with a bounded time (`child.py`): the copy limit
(`limit.py`), our sync (`ours.py`) or one of vLLM's backends (`peers.py`). `result.py` and `table.py`
hold what was measured and how it is shown. Read `run.py` first.

Beside it stand three benches of their own: a sync over a link of a set rate (`wire.py`, with its link,
nodes, row and table), one rank's planning by number of names (`bake.py`), and the trainer's load (`load.py`).
"""
