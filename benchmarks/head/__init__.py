"""What one head can hold: `python -m benchmarks.head`, `make bench-head`."""
