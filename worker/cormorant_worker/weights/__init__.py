"""Published weights: one safetensors blob from publish to apply, and staging beside the weights that act."""
