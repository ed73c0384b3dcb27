"""Observations as pictures: which leaf is one, which of its frames is the newest, and PNG. Pure functions.

# S frames of a stack, H rows, W columns, C channels
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cormorant_worker.spaces import Array, Leaf

_SMALLEST = 4
_LARGEST = 480
"""Longest side of what is sent; larger ones are thinned out."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _COLOUR = 0, 2
_NUM_COLOURS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The leaf of an observation that people can look at."""

    leaf: int
    """Its position in the layout."""
    shape: tuple[int, ...]


def find_picture(leaves: Sequence[Leaf]) -> Picture | None:
    """The largest leaf of bytes with two or more sides; None when there is none."""
    found = [
        Picture(leaf=i, shape=leaf.shape)
        for i, leaf in enumerate(leaves)
        if leaf.dtype == np.uint8 and len(leaf.shape) in (2, 3, 4) and min(_sides(leaf.shape)) >= _SMALLEST
    ]
    return max(found, key=lambda picture: int(np.prod(picture.shape)), default=None)


def size_of(picture: Picture) -> tuple[int, int]:
    """Height and width in pixels of what `newest_frame` gives."""
    height, width = _sides(picture.shape)
    thin = _thinning(height, width)
    return -(-height // thin), -(-width // thin)


def newest_frame(pixels: Array) -> Array:
    """What is to be seen of an observation.

    Args:
        pixels: uint8 [H, W], [C, H, W], [H, W, C], or a stack [S, ...] of those. C is the shorter end; 3 and its
            multiples are colours, stacked from old to new, any other number is a stack of grey frames.

    Returns:
        uint8 [H, W] or [H, W, 3].
    """
    if pixels.ndim == 4:
        pixels = pixels[-1]
    if pixels.ndim == 3:
        pixels = np.moveaxis(pixels, 0, -1) if _is_channels_first(pixels.shape) else pixels
        channels = pixels.shape[-1]
        pixels = pixels[..., -1] if channels % _NUM_COLOURS else pixels[..., -_NUM_COLOURS:]
    thin = _thinning(*pixels.shape[:2])
    return pixels[::thin, ::thin]


def png_of(frame: Array) -> bytes:
    """A frame, uint8 [H, W] or [H, W, 3], as a PNG file."""
    height, width = frame.shape[:2]
    rows = np.zeros((height, 1 + frame[0].size), np.uint8)  # each begins with its filter: 0, none
    rows[:, 1:] = frame.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _GREY if frame.ndim == 2 else _COLOUR, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    shape = shape[1:] if len(shape) == 4 else shape
    if len(shape) == 3:
        shape = shape[1:] if _is_channels_first(shape) else shape[:2]
    return shape[0], shape[1]


def _is_channels_first(shape: tuple[int, ...]) -> bool:
    return shape[0] <= shape[2]


def _thinning(height: int, width: int) -> int:
    return max(1, -(-max(height, width) // _LARGEST))
