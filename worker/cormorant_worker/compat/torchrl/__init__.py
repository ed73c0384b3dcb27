"""TorchRL's names over our environments and fleets; scripts import them from `cormorant_worker.torchrl`."""
