"""One collector: environments and a policy stepped in one process, frames written into blocks."""
