"""The head's records of, and decisions about, its fleet."""
