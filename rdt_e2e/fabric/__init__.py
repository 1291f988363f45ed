"""NIXL, as both fleets use it through Ray: one agent per process.

In: memory to be read or written by others. Out: its registration. `agent.py` builds the agent and
registers; `progress.py` keeps its thread from taking a whole core where there is none to spare.
"""
