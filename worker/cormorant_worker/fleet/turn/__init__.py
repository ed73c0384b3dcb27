"""Actions of a fleet: its thread reads workers' messages, issues tickets, fills slots and ends workers."""
