"""Tianshou's names over our collectors; scripts import them from `cormorant_worker.tianshou`."""
