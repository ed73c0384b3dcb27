"""The worker's side of a fleet, the same under every transport."""
