"""NIXL, as both fleets use it through Ray: one agent per process.

In: memory to be read or written by others. Out: its registration. `agent.py` builds the agent and
registers; `agent_config.py` makes it safe for threads, and keeps its own from taking a whole core.
"""
