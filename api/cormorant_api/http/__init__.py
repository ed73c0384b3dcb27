"""HTTP for a head: ports, tokens, bodies and problems. Does not depend on the head."""
