"""The trainer fleet: holds the sharded checkpoint and serves it to the consumers.

In: a checkpoint folder, of which each rank reads its own rows. Out: packed bytes, pulled over NIXL.
A tensor's way: `shards.py` (held as FSDP2 shards, gathered) -> `gather_cache.py` (published until
every consumer is done with its group) -> `packing.py` (op chains replayed, laid out) ->
`serve_ring.py` (the registered slot it is pulled from). `producer.py` joins them and is what
consumers call; `worker.py` is the Ray actor and `fleet.py` starts one per GPU. Read `producer.py`
first.
"""
