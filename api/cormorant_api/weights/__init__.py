"""Published weights: from a validated body to every worker."""
