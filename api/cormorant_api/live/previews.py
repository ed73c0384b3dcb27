"""Observations as images: which part of one is a picture, its newest frame, and that frame as PNG.

# S frames of a stack, H rows, W columns, C channels
"""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from cormorant_worker.spaces import Array, Leaf

_SMALLEST = 4
_LARGEST = 480
"""Longest side in pixels; larger images are subsampled."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GRAY, _COLOR = 0, 2
_NUM_COLORS = 3


def find_picture(leaves: Sequence[Leaf]) -> int | None:
    """Index of the largest uint8 leaf with image shape; None if there is none."""
    pictures = [
        i
        for i, leaf in enumerate(leaves)
        if leaf.dtype == np.uint8
        and len(leaf.shape) in (2, 3, 4)
        and min(_newest(np.broadcast_to(np.uint8(0), leaf.shape)).shape[:2]) >= _SMALLEST
    ]
    return max(pictures, key=lambda i: int(np.prod(leaves[i].shape)), default=None)


def newest_frame(pixels: Array) -> Array:
    """The newest frame of an observation. `pixels`: uint8 [H, W], [C, H, W], [H, W, C], or a stack [S, ...] of those. C
    is the shorter end; 3 and its multiples are RGB frames, oldest first; any other number is a stack of gray frames.

    Returns:
        uint8 [H, W] or [H, W, 3].
    """
    frame = _newest(pixels)
    thin = max(1, -(-max(frame.shape[:2]) // _LARGEST))
    return frame[::thin, ::thin]


def _newest(pixels: Array) -> Array:
    """The newest frame in full size."""
    if pixels.ndim == 4:
        pixels = pixels[-1]
    if pixels.ndim == 3:
        pixels = np.moveaxis(pixels, 0, -1) if pixels.shape[0] <= pixels.shape[2] else pixels
        channels = pixels.shape[-1]
        pixels = pixels[..., -1] if channels % _NUM_COLORS else pixels[..., -_NUM_COLORS:]
    return pixels


def png_of(frame: Array) -> bytes:
    """Encode a frame, uint8 [H, W] or [H, W, 3], as PNG."""
    height, width = frame.shape[:2]
    rows = np.zeros((height, 1 + frame[0].size), np.uint8)  # each row begins with its filter type: 0, none
    rows[:, 1:] = frame.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _GRAY if frame.ndim == 2 else _COLOR, 0, 0, 0)
    png = _SIGNATURE
    for chunk in (b"IHDR" + header, b"IDAT" + zlib.compress(rows.tobytes(), 1), b"IEND"):
        png += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png
