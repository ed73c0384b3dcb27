"""Settings of a head."""

import pytest

from cormorant_api.settings import HeadSettings


@pytest.mark.parametrize(
    ("port", "data_port", "ports"),
    [(8000, 0, (8000, 8001)), (8000, 9000, (8000, 9000)), (0, 0, (0, 0)), (65535, 0, (65535, 0))],
)
def test_the_data_port_is_the_next_one_where_there_is_one(port: int, data_port: int, ports: tuple[int, int]) -> None:
    assert HeadSettings(port=port, data_port=data_port).ports == ports
