"""Ports, tokens, bodies and problems: HTTP for a head, without knowing one."""
