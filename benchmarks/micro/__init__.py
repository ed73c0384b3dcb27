"""One question a file, each with a `measure(quick)` that returns rows for the table."""
