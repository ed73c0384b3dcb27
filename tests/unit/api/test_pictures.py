"""Which part of an observation is a picture, and what is sent of it."""

import io

import numpy as np
import pytest
from PIL import Image

from cormorant_api.live.previews import find_picture, newest_frame, png_of, size_of
from cormorant_worker.spaces import Array, Leaf


def leaf(*shape: int, dtype: type = np.uint8) -> Leaf:
    return Leaf(key=("observation",), shape=shape, dtype=np.dtype(dtype))


def numbered(*shape: int) -> Array:
    return (np.arange(int(np.prod(shape))) % 251).astype(np.uint8).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "newest"),
    [
        ((84, 84), lambda p: p),
        ((1, 84, 84), lambda p: p[0]),
        ((4, 84, 84), lambda p: p[3]),
        ((84, 84, 4), lambda p: p[:, :, 3]),
        ((84, 84, 1), lambda p: p[:, :, 0]),
        ((210, 160, 3), lambda p: p),
        ((3, 96, 72), lambda p: np.moveaxis(p, 0, -1)),
        ((12, 96, 72), lambda p: np.moveaxis(p[9:], 0, -1)),
        ((4, 210, 160, 3), lambda p: p[3]),
        ((1000, 400), lambda p: p[::3, ::3]),
    ],
)
def test_the_newest_frame_comes_out_as_it_is(shape: tuple[int, ...], newest: object) -> None:
    pixels = numbered(*shape)
    expected = newest(pixels)  # type: ignore[operator]  # a function of the table
    frame = newest_frame(pixels)
    assert np.array_equal(frame, expected)
    assert size_of(shape) == frame.shape[:2]
    with Image.open(io.BytesIO(png_of(frame))) as image:
        image.load()
        assert image.mode == ("L" if frame.ndim == 2 else "RGB")
        assert np.array_equal(np.asarray(image), frame)


def test_the_largest_picture_is_taken() -> None:
    leaves = (leaf(4), leaf(8, 8), leaf(64, 64, 3), leaf(500, 500, dtype=np.float32))
    assert find_picture(leaves) == 2


@pytest.mark.parametrize(
    "other", [leaf(), leaf(4), leaf(4, dtype=np.float32), leaf(84, 84, dtype=np.float32), leaf(2, 2), leaf(4, 3, 90)]
)
def test_what_has_not_two_sides_of_bytes_is_no_picture(other: Leaf) -> None:
    assert find_picture((other,)) is None
