"""The durable dataset."""
