"""The engine of one machine: worker processes and shared memory."""
