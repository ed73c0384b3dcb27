"""The endpoints, one module per noun."""
