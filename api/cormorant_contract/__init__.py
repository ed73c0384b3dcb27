"""Everything that two processes of Cormorant must agree on. Imports pydantic and the standard library; gymnasium where
spaces are read.

`job.CollectorJob` is the manifest as a value, `parsing.parse_job` makes it from a loaded document, `schema.crd` is its
CustomResourceDefinition.
"""
