"""Collectors, environments, policies, datasets and fleets. Users import `cormorant`.

Environment processes import this package, so it does not import torch.
"""
