"""Decides what a job needs: pure functions of a job, what was observed, and the time."""
