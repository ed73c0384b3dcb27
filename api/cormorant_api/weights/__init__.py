"""Published weights, from a checked body to every worker."""
