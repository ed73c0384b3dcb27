"""What the control plane and its clients say to each other: a pydantic model for every JSON body, names of headers,
problem types. JSON keys are snake_case, times RFC 3339 in UTC, durations carry their unit in the name.
"""
