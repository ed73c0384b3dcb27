"""Evaluations: a fixed list of episodes, each played exactly once, with the same results on any number of workers."""
