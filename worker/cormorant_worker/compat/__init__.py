"""Compatibility layers: other libraries' collector APIs over this package's collectors and fleets."""
