"""A checkpoint folder on disk: what is in it, how it is held, and how its bytes are read.

In comes a folder with `config.json`, `model.safetensors.index.json` and the shards the index names.
Out come a validated `CheckpointIndex` (`index.py`, headers only, with the checks of `checks.py`), a
`CheckpointLayout` of fused expert stacks and gather groups (`layout.py`, pure), and the rows of one
trainer rank (`stream.py`, the only module here that needs torch). Read `layout.py` first;
`naming.py` is the one place that knows how tensor names are built.
"""
