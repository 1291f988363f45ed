"""The embedded default model: a small, really trained checkpoint in the form Kimi K2 ships.

In: a cache directory and a variant. Out: a checkpoint folder with FP8 shards, tokenizer and the
recorded reference text. `build.ensure_mini_kimi` is the entry; read `recipe` first, which holds
everything that decides what the model says. Importing this package loads neither torch nor
transformers.
"""

from rdt_e2e.mini_kimi.build import ensure_mini_kimi
from rdt_e2e.mini_kimi.recipe import VARIANTS, recipe_hash

__all__ = ["VARIANTS", "ensure_mini_kimi", "recipe_hash"]
