"""Manifests in YAML as CollectorJobs. A package of its own because the command line and `cormorant_worker` read
the same files, neither may import the other, and the contract knows no YAML.
"""
