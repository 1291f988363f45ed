"""A checkpoint folder on disk: what is in it, how it is held, and how its bytes are read.

In comes a folder with `config.json` and safetensors shards, found by `source.py` (in a hub cache by
`hub.py`). Out come a validated `CheckpointIndex` (`index.py`, headers only, with the checks of
`checks.py` and `scales.py`), a `CheckpointLayout` of fused expert stacks and gather groups (`layout.py`,
pure), and the rows of one trainer rank (`stream.py`, the only module here that needs torch). Read
`layout.py` first; `naming.py` knows how tensor names are built, `settings.py` what `config.json` calls
things, and `described.py` makes the index of a model that is not on this machine.
"""
