"""Normalized observations as the policy saw them, from a batch's raw frames and the statistics of its versions.

The same arithmetic as in the workers, in float64: equal bit for bit.

# B envs, T steps, V versions in the batch
"""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from cormorant_postproc.pieces import PostprocError, flag, leaf_of, valid_frames

EPSILON = 1e-8
_REWARD = "next/reward"

Document = Mapping[str, Mapping[str, Any]]


def normalized(batch: TensorDictBase, statistics: Mapping[int, Document] | Document | None) -> TensorDict:
    """Normalize a batch as `spec.collection.normalize` of its job says.

        seen = normalized(batch.tensordict(), batch.statistics)

    Args:
        batch: `[B, T]` raw frames with `("collector", "policy_version")`; padded frames become zero.
        statistics: statistics by policy version: each frame is normalized with those of the version that collected it,
            random frames with the newest. Or statistics of one version, for all frames.

    Returns:
        A shallow copy in which the normalized observations, at the root and in `next`, are float32: what the policy
        saw, and what the same version would have seen next. `("next", "reward")` is divided by the standard deviation
        of the discounted return, and clipped.

    Raises:
        PostprocError: a version in the batch has no statistics, or they belong to other observations.
    """
    given: dict[Any, Any] = dict(statistics or {})
    if not given:
        raise PostprocError("no statistics were given; pass fleet.statistics of a job with collection.normalize")
    result: TensorDict = batch.copy()
    is_single = any(isinstance(name, str) for name in given)
    index_BT, documents = (None, [given]) if is_single else _find_versions(batch, given)
    mask_BT = valid_frames(batch)
    for name in documents[0]:
        entries, key = [document[name] for document in documents], tuple(name.split("/"))
        result[key] = _scale(leaf_of(batch, key), name, entries, index_BT, mask_BT)
        if name != _REWARD and (following := batch.get(("next", *key), None)) is not None:
            result["next", *key] = _scale(following, name, entries, index_BT, mask_BT)
    return result


def _find_versions(
    batch: TensorDictBase, by_version: Mapping[int, Document]
) -> tuple[torch.Tensor | None, list[Document]]:
    """The statistics that are needed, and for each frame which of them; None: all frames have the only ones."""
    versions_BT = flag(batch, ("collector", "policy_version"))
    newest = max(by_version)
    acted_BT = torch.where(versions_BT < 0, newest, versions_BT)
    if (mask_BT := valid_frames(batch)) is not None:
        acted_BT = torch.where(mask_BT, acted_BT, acted_BT[mask_BT].max() if mask_BT.any() else newest)
    versions, index_BT = acted_BT.unique(return_inverse=True)
    needed: list[int] = versions.tolist()
    if missing := [version for version in needed if version not in by_version]:
        raise PostprocError(
            f"the statistics of version {missing[0]} are not among those given ({min(by_version)} to {newest}); keep "
            "the statistics of a batch with the batch, or pass those of one version"
        )
    return (index_BT if len(needed) > 1 else None), [by_version[version] for version in needed]


def _scale(
    raw: torch.Tensor,
    name: str,
    entries: list[Mapping[str, Any]],
    index_BT: torch.Tensor | None,
    mask_BT: torch.Tensor | None,
) -> torch.Tensor:
    """One leaf, with the statistics of each version and the index of each frame's version."""
    shown = name.replace("/", ".")
    mean_V = torch.tensor([entry["mean"] for entry in entries], dtype=torch.float64)
    shape = mean_V.shape[1:]
    if shape and raw.shape[-len(shape) :] != shape:
        raise PostprocError(
            f"{shown} has shape {list(raw.shape)}, its statistics {list(shape)}; normalize before stacking frames"
        )
    m2_V = torch.tensor([entry["m2"] for entry in entries], dtype=torch.float64)
    count_V, clip_V = (
        torch.tensor(values, dtype=torch.float64).reshape(-1, *[1] * len(shape))
        for values in ([entry["count"] for entry in entries], [entry["clip"] or torch.inf for entry in entries])
    )
    is_known_V = count_V >= 2  # until then values pass
    std_V = torch.where(is_known_V, torch.sqrt(m2_V / count_V + EPSILON), 1.0)
    parts = []
    for part in (torch.where(is_known_V, mean_V, 0.0), std_V, clip_V):
        chosen = part.to(raw.device)
        chosen = chosen[0] if index_BT is None else chosen[index_BT.to(raw.device)]
        if index_BT is not None:
            # What the statistics know nothing of, such as a stack's frames, lies between the frames and their leaf.
            chosen = chosen.reshape(*index_BT.shape, *[1] * (raw.ndim - chosen.ndim), *chosen.shape[index_BT.ndim :])
        parts.append(chosen)
    center, std, clip = parts
    values = raw.to(torch.float64)
    values = (values if name == _REWARD else values - center) / std
    values = values.clamp(-clip, clip).to(torch.float32)
    if mask_BT is not None:
        mask = mask_BT.to(raw.device)
        values = torch.where(mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim)), values, 0.0)
    return values
