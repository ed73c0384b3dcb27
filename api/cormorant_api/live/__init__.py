"""The live page: what it shows, and its files."""
