"""Whether the weights that arrived are the right ones.

In: what the engine says, and a reference from an independent path. Out: a verdict, or an error that
says where they part. Read `text.py`.
"""
