"""The Ray engine: a worker is an actor, a batch an object. Only this package imports Ray; it begins in `engine.py`."""
