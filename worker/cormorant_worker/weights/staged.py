"""The policy's weights in a worker: offered by anyone, verified, applied at a batch boundary.

    OFFERED -> (a newer one comes) SUPERSEDED
    OFFERED -> APPLIED

One thread offers, the collector's thread applies; the lock guards the offer that waits.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

import torch

from cormorant_contract.weights import is_extra_state
from cormorant_worker.errors import NonfiniteWeights, StaleWeights, WeightsMismatch

if TYPE_CHECKING:
    from cormorant_worker.normalize import Statistics
    from cormorant_worker.policy.normalizer import Normalizer

PolicyVersion = NewType("PolicyVersion", int)
"""Grows with every publish. 0: the weights that the policy was built with."""

INITIAL_VERSION = PolicyVersion(0)
RANDOM_VERSION = PolicyVersion(-1)
"""Stamped on frames in which no policy acted: warm-up frames, and all frames of the random policy."""

Weights = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by model name, then by name in the model's state dict."""

_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: str
    """Torch's name without the prefix, e.g. "float32"."""


WeightSpecs = Mapping[str, Mapping[str, TensorSpec]]


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's weights: its state dict without what `get_extra_state` adds, which may be anything."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not is_extra_state(name)}


def specs_of_tensors(weights: Weights) -> dict[str, dict[str, TensorSpec]]:
    return {
        model: {
            name: TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }
        for model, tensors in weights.items()
    }


def verify(found: WeightSpecs, specs: WeightSpecs, *, only: str = "", where: str = "") -> None:
    """Compare the whole set of tensors with what the policy needs, before anything is applied. `only`: the only model
    that may be among them; empty: each of the policy's. Raises WeightsMismatch with all differences, and with `where`
    in the message.
    """
    if not specs:
        raise WeightsMismatch(
            "the policy has no weights to replace: it is random or a plain callable; pass a torch module whose forward "
            "returns the action"
        )
    if not found:
        raise WeightsMismatch(f"no model was given; publish one of {sorted(specs)}")
    models = [only] if only else [model for model in found if model in specs]
    needed = {f"{model}/{name}": spec for model in models for name, spec in specs[model].items()}
    given = {f"{model}/{name}": spec for model, tensors in found.items() for name, spec in tensors.items()}
    both = [(name, spec, needed[name]) for name, spec in given.items() if name in needed]
    differences = {
        "missing": [name for name in needed if name not in given],
        "unexpected": [name for name in given if name not in needed]
        + [model for model, tensors in found.items() if not tensors and model not in models],
        "shape": [f"{n} is {list(a.shape)}, not {list(b.shape)}" for n, a, b in both if a.shape != b.shape],
        "dtype": [f"{n} is {a.dtype}, not {b.dtype}" for n, a, b in both if a.shape == b.shape and a.dtype != b.dtype],
    }
    told = [f"{what}: {name}" for what, names in differences.items() for name in names]
    if told:
        more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise WeightsMismatch(
            f"{len(told)} tensors{where} do not fit the policy, whose models are {sorted(specs)}: "
            f"{'; '.join(told[:_SHOWN])}{more}; nothing was applied",
            differences=differences,
        )


def check_finite(weights: Weights, remedy: str) -> None:
    """Refuse NaN and infinite values, in one pass. Raises NonfiniteWeights with the first tensor, how many others, the
    remedy.
    """
    bad = [
        f"{model}/{name}"
        for model, tensors in weights.items()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not _is_finite(tensor)
    ]
    if bad:
        others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NonfiniteWeights(f"{bad[0][:200]}{others}: NaN or infinite values; {remedy}")


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return True
    values = tensor if tensor.element_size() > 1 else tensor.to(torch.float32)  # float8 has no order in torch
    least, most = torch.aminmax(values)  # NaN where one value is
    return math.isfinite(least) and math.isfinite(most)


class StagedWeights:
    """Holds the newest offer until the collector reaches a batch boundary."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], normalizer: "Normalizer | None" = None) -> None:
        """Hold the weights of a policy, and the statistics that it acts with, if it acts on normalized observations."""
        self._modules = dict(modules)
        self.normalizer = normalizer
        self.stamp: Callable[[PolicyVersion], Statistics] | None = None
        """Gives the statistics of versions that are offered without any, where no fleet does."""
        self.specs = specs_of_tensors({model: tensors_of(module) for model, module in modules.items()})
        self.version = INITIAL_VERSION
        self.on_applied: Callable[[PolicyVersion], None] = lambda version: None
        """Told each version as it begins to act, by the thread that applies it."""
        self.on_offered: Callable[[PolicyVersion, Weights], None] = lambda version, weights: None
        """Told each offer that was staged, in order, by the thread that offers. The tensors' memory is the caller's."""
        self.versions = dict.fromkeys(modules, INITIAL_VERSION)
        """The version of each model that acts."""
        self._offered_versions: dict[str, PolicyVersion] = {}
        self._lock = threading.Condition()
        """Guards `_offered` and the versions; notified of every offer."""
        self._offered: Weights | None = None
        self._statistics: Statistics | None = None
        self._offered_version = INITIAL_VERSION
        self._seen_version = INITIAL_VERSION
        """The newest version seen, staged or refused: `wait_until_offered` returns for it."""

    def offer(self, weights: Weights, *, version: PolicyVersion, statistics: "Statistics | None" = None) -> None:
        """Stage weights for the next batch boundary, with the statistics that they act with. An older offer that still
        waits is superseded. Raises WeightsMismatch, and StaleWeights where the version is not newer than the newest one
        offered or applied; nothing is staged then.
        """
        try:
            verify(specs_of_tensors(weights), self.specs)
            with self._lock:
                newest = max(self.version, self._offered_version)
                if version <= newest:
                    raise StaleWeights(
                        f"weights version {version} is not newer than {newest}; publish a higher version"
                    )
                # A publish may name some models only: what an unapplied older offer holds of others still counts.
                self._offered, self._offered_version = {**(self._offered or {}), **weights}, version
                self._offered_versions |= dict.fromkeys(weights, version)
                self.on_offered(version, weights)
                self._statistics = statistics or (self.stamp(version) if self.stamp is not None else None)
        finally:
            self.note_seen(version)

    def note_seen(self, version: PolicyVersion) -> None:
        """Weights of this version arrived, and were staged or refused: waiters for them return."""
        with self._lock:
            self._seen_version = max(self._seen_version, version)
            self._lock.notify_all()

    def wait_until_offered(self, version: PolicyVersion, timeout_s: float) -> bool:
        """Wait until weights of this version or a newer one came, refused or not. False after `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: max(self.version, self._seen_version) >= version, timeout_s)

    def apply(self) -> PolicyVersion:
        """Copy the staged weights into the modules, if there are any. Called between batches, by the acting thread."""
        if self._offered is None:
            return self.version
        with self._lock:
            weights, version, statistics = self._offered, self._offered_version, self._statistics
            self._offered = self._statistics = None
            self.versions |= self._offered_versions
        self._copy(weights or {})
        if self.normalizer is not None and statistics is not None:
            self.normalizer.use(statistics)
        self.version = version
        self.on_applied(version)
        return version

    def load(self, weights: Weights, statistics: "Statistics | None" = None, *, where: str = "") -> None:
        """Replace weights (all or some models) that the policy was built with, before anything was collected; the
        version stays. `statistics`: what they act with; None: values are clipped only. Raises WeightsMismatch, with
        `where` in the message; nothing is applied then.
        """
        verify(specs_of_tensors(weights), self.specs, where=where)
        self._copy(weights)
        if self.normalizer is not None:
            self.normalizer.use(statistics or self.normalizer.empty)

    def _copy(self, weights: Weights) -> None:
        with torch.no_grad():
            for model, tensors in weights.items():
                own = tensors_of(self._modules[model])
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)

    def set_evaluating(self) -> None:
        """Put the modules into evaluation mode: no dropout, stored batch statistics."""
        for module in self._modules.values():
            module.eval()

    def current(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of the weights that act now, on the CPU."""
        return {
            model: {name: tensor.detach().cpu().clone() for name, tensor in tensors_of(module).items()}
            for model, module in self._modules.items()
        }
