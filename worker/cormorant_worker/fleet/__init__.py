"""Who runs collectors: processes of this machine, later actors on Ray."""
