"""What the head remembers and decides about its fleet."""
