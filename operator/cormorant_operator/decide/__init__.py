"""Decides what a job needs: pure functions of a job, what is known of it, and the time."""
