"""The Ray engine: a worker is an actor, a batch an object. The only room that imports Ray; `fleet.py` is its door."""
