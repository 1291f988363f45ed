"""Print one line per live node of the Ray cluster that RAY_ADDRESS names: address and GPUs."""

import logging
import sys

import ray

ray.init(logging_level=logging.ERROR, log_to_driver=False)
for node in ray.nodes():
    if node["Alive"]:
        gpus = int(node["Resources"].get("GPU", 0))
        sys.stdout.write(f"{node['NodeManagerAddress']} {gpus} GPUs\n")
