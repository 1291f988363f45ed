"""The inference fleet: vLLM's `AsyncLLM`, started on dummy weights and fed by the sync.

In: a checkpoint folder (its `config.json` and tokenizer only) and the driver's init payload.
Out: greedy text, and workers whose weights are the trainer's.
Read `engine.py` first; `plugin/` is what runs inside vLLM's own processes.
"""
