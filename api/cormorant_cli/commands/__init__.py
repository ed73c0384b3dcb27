"""One module per command or group of commands; `app.py` assembles them."""
