"""Where the seconds of a sync went: measured in every process, collected off every node, explained.

In comes what runs anyway: the driver's steps, live producers and consumers. Out go `profile.json`,
a text report, a Perfetto trace and one HTML page in the run directory. Read `recorder.py` for the
order of things, `columns.py` for what is measured, `attribution.py` for what is concluded.
"""
