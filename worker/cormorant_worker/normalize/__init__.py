"""Running statistics of observations and returns: merged from batches, published with weights."""
