"""What a fleet does: its thread hears workers, hands tickets out, fills slots and ends workers."""
