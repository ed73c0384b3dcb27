"""Fleets of collectors: processes of this machine, or actors on Ray."""
