"""Other people's collectors on the same work. They run in `.venv-peers`; `setup` makes it."""
