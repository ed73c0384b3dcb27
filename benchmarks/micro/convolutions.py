"""`python -m benchmarks.micro.convolutions`: processor time of one call of the Nature CNN, by candidate: decision 0046.

Each candidate gets uint8 pixels and gives logits, in one thread. Not part of `make bench`: it needs a minute by itself.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.utils import mkldnn

from benchmarks.micro.rows import interleaved, main, median_ratio, row
from benchmarks.networks import AtariCnn

CALLS = 8
PIXELS = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)


def candidates(pixels: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    plain = AtariCnn(PIXELS, gymnasium.spaces.Discrete(6)).body.eval()
    yield "plain", lambda: plain(pixels.float() / 255)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    yield "channels_last", lambda: last((pixels.float() / 255).contiguous(memory_format=torch.channels_last))
    folded = copy.deepcopy(plain)
    folded[0].weight /= 255
    yield "the scale in the first layer's weights", lambda: folded(pixels.float())
    frozen = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(folded, pixels.float())))
    yield "the same, frozen by torch.jit", lambda: frozen(pixels.float())
    packed, rest = mkldnn.to_mkldnn(copy.deepcopy(folded)[:6]), folded[6:]
    yield "the same, weights packed for oneDNN", lambda: rest(packed(pixels.float().to_mkldnn()).to_dense())

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(pixels.float() / 255)

    yield "bfloat16 by autocast", autocast
    half = copy.deepcopy(folded).to(torch.bfloat16)
    yield "bfloat16 weights", lambda: half(pixels.bfloat16())
    packed_half, rest_half = mkldnn.to_mkldnn(copy.deepcopy(folded)[:6], torch.bfloat16), half[6:]
    yield (
        "bfloat16 weights packed for oneDNN",
        lambda: rest_half(packed_half(pixels.bfloat16().to_mkldnn()).to_dense()),
    )
    eight = nn.Sequential(quantization.QuantStub(), *copy.deepcopy(plain), quantization.DeQuantStub()).eval()
    torch.backends.quantized.engine, eight.qconfig = "x86", quantization.get_default_qconfig("x86")
    quantization.fuse_modules(eight, [["1", "2"], ["3", "4"], ["5", "6"], ["8", "9"]], inplace=True)
    quantization.prepare(eight, inplace=True)
    eight(pixels.float() / 255)
    quantization.convert(eight, inplace=True)
    yield "int8, calibrated", lambda: eight(pixels.float() / 255)


def measure(*, quick: bool) -> Iterator[dict]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for num_rows in (8, 32, 64):
        with torch.no_grad():
            pixels = torch.randint(0, 256, (num_rows, *PIXELS.shape), dtype=torch.uint8)
            calls = dict(candidates(pixels))
            jobs = [lambda call=call: [call() for _ in range(CALLS)] for call in calls.values()]
            times = interleaved(*jobs, rounds=3 if quick else 25, clock=time.process_time)
        for name, seconds in zip(calls, times, strict=True):
            note = f"{median(seconds) / CALLS * 1e3:.2f} ms"
            yield row(f"{name}, {num_rows} rows", median_ratio(times[0], seconds), "speed-up", note=note)


if __name__ == "__main__":
    main(measure)
