"""The sync itself: what the consumers are told, and the loop that drives both fleets.

In: a configuration. Out: a run directory with the texts, the timings and the verdict.
`driver.py` is the whole run on one screen and `session.py` is one sync; `plan.py` is the init payload,
pure; `record.py` is what is written down. Read `driver.py` first.
"""
