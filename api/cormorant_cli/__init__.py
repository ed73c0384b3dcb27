"""`cormorant` on the command line. Starts without torch: a command's body imports what it needs."""
