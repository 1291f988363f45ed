"""`python -m rdt_e2e.cli`, where the command is not installed."""

from rdt_e2e.cli import main

main()
