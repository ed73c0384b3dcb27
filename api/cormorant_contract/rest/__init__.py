"""What the control plane and its clients say to each other in JSON."""
