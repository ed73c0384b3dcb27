"""The REST API's data: a pydantic model for every JSON body, names of headers,
problem types. JSON keys are snake_case, times RFC 3339 in UTC, durations carry their unit in the name.
"""
