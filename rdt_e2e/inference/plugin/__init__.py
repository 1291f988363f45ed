"""What vLLM needs to run this job without a GPU, behind vLLM's own entry points.

`platform.py` and `register.py` are the entry points; both do nothing on a CUDA build of vLLM.
The rest: a CPU platform with logical GPUs (`cpu_platform.py`), its collectives
(`communicator.py`), FP8 block-scale layers (`fp8_reference.py`) and the consumer without CUDA
streams (`consumer.py`). Private names of vLLM are imported in `internals.py` only.
"""
