"""The Ray cluster both fleets run on.

In: the configuration. Out: a joined cluster with a trainer node and an inference node.
`local.py` starts two Ray nodes on this machine; `session.py` joins a cluster, whoever started it;
`placement.py` finds the two nodes. Read `session.py` first. Two more ways to deploy need no Ray here:
`kubernetes.py`, with its `kube_*` parts and `kubectl.py`, and `compose.py`.
"""
