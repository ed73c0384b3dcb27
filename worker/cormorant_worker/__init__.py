"""Collectors, environments, policies, datasets and fleets. Users import `cormorant`.

Processes of subprocess environments import this package: it stays without torch.
"""
