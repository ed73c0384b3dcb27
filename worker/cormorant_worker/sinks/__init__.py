"""Where batches go: the durable dataset."""
