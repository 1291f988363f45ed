"""How large a sync is and where its bytes go, worked out before anything is started. Pure.

In come a checkpoint index (off disk, or described by `catalog.py`) and a `Deployment`. What each
consumer pulls (`slices.py`) becomes chunks with their producers (`chunks.py`, vLLM's own rules), and
those become memory (`memory.py`), seconds (`times.py`) and advice (`advice.py`). `plan.py` puts it
together, `command.py` is the verb `rdt-e2e plan`. Read `plan.py` first. Nothing here imports torch, Ray
or vLLM.
"""
