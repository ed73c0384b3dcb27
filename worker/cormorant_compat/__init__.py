"""Compatibility layers: the collector APIs of TorchRL and Tianshou over Cormorant's collectors and fleets."""
