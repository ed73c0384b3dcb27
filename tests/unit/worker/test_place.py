import pytest

from cormorant_worker.collect.place import egl_device


@pytest.mark.parametrize(
    ("index", "visible", "egl"),
    [(0, "", "0"), (3, "", "3"), (1, "4,6", "6"), (0, "GPU-8a6f,GPU-90c1", "0"), (2, "5", "2")],
)
def test_egl_counts_all_devices_of_the_machine(index: int, visible: str, egl: str) -> None:
    assert egl_device(index, visible=visible) == egl
