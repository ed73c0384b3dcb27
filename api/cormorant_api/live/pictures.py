"""Observations as images: finds the image leaf and its newest frame, and encodes PNG. Pure functions.

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
"""Longest side in pixels; larger images are subsampled."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _COLOUR = 0, 2
_NUM_COLOURS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    leaf: int
    """Index in the layout."""
    shape: tuple[int, ...]


def find_picture(leaves: Sequence[Leaf]) -> Picture | None:
    """The largest uint8 leaf with image shape; None if there is none."""
    found = [
        Picture(leaf=i, shape=leaf.shape)
        for i, leaf in enumerate(leaves)
        if leaf.dtype == np.uint8 and len(leaf.shape) in (2, 3, 4) and min(_sides(leaf.shape)) >= _SMALLEST
    ]
    return max(found, key=lambda picture: int(np.prod(picture.shape)), default=None)


def size_of(picture: Picture) -> tuple[int, int]:
    """Height and width in pixels of the result of `newest_frame`."""
    height, width = _sides(picture.shape)
    thin = _thinning(height, width)
    return -(-height // thin), -(-width // thin)


def newest_frame(pixels: Array) -> Array:
    """The newest frame of an observation. `pixels`: uint8 [H, W], [C, H, W], [H, W, C], or a stack [S, ...] of those. C
    is the shorter end; 3 and its multiples are RGB frames, oldest first; any other number is a stack of grey frames.

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
    """Encode a frame, uint8 [H, W] or [H, W, 3], as PNG."""
    height, width = frame.shape[:2]
    rows = np.zeros((height, 1 + frame[0].size), np.uint8)  # each row begins with its filter type: 0, none
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
