"""What a fleet knows: each class alone writes its own state, under the fleet's condition (`core.py`)."""
