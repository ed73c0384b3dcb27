"""What the operator costs, and how quick it is: offline (`upkeep`), and on a real API server (`python -m ...`)."""
