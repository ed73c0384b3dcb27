"""Process 1 of a job's pods: starts Ray, keeps it joined to the job's head, and ends it in order. See `__main__`."""
