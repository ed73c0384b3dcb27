"""One module a command, or a group of commands; `app.py` puts them together."""
