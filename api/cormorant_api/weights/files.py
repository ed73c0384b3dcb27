"""Safetensors files of models: extracted from an upload, joined, and merged with a partial upload."""

from collections.abc import Mapping

from cormorant_api.errors import ApiError
from cormorant_api.weights.store import StoredModel
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.tensor_file import TensorEntry, make_header, parse_header
from cormorant_worker.weights.blob import WeightsBlob

Tensors = dict[str, tuple[TensorEntry, memoryview]]
"""Entries and bytes by name, in the order of a file."""


def cut(blob: WeightsBlob, entries: Mapping[str, TensorEntry]) -> tuple[memoryview, ...]:
    """Pieces of a file of one model's tensors, with unprefixed names and the metadata of the whole."""
    parsed = parse_header(blob.buffer)
    return _laid_out(_located(blob.buffer[parsed.data_start :], entries), parsed.metadata)


def joined(models: Mapping[str, StoredModel]) -> WeightsBlob:
    """Several models in one file, with the model as name prefix and the metadata of the newest."""
    newest = max(stored.version for stored in models.values())
    tensors: Tensors = {}
    metadata: Mapping[str, str] = {}
    for model, stored in sorted(models.items()):
        parsed = parse_header(stored.file)
        metadata = parsed.metadata if stored.version == newest else metadata
        for name, found in _located(stored.file[parsed.data_start :], parsed.tensors).items():
            tensors[f"{model}/{name.removeprefix(model + '/')}"] = found
    return WeightsBlob.joined(_laid_out(tensors, metadata))


def merge(base: StoredModel, patch: WeightsBlob) -> WeightsBlob:
    """A copy of the base with the patch's tensors and metadata: metadata never belongs to two publishes.

    The layout is the base's, so the same patch over the same base gives the same bytes and digest.

    Raises:
        ApiError: 409, the base lacks such a tensor.
    """
    before, theirs = parse_header(base.file), parse_header(patch.buffer)
    tensors = _located(base.file[before.data_start :], before.tensors)
    names = {name.removeprefix(f"{base.name}/"): name for name in tensors}
    patched = _located(patch.buffer[theirs.data_start :], patch.tensors.get(base.name, {}))
    for name, (new, data) in patched.items():
        old = tensors[names[name]][0] if name in names else None
        if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
            found = "lacks" if old is None else f"has {old.dtype} {list(old.shape)} for"
            raise ApiError(
                ProblemType.BASE_MISMATCH,
                f"version {base.version} {found} {base.name}/{name[:80]}, but the patch has it as {new.dtype} "
                f"{list(new.shape)}: the version belongs to another policy; publish all tensors",
                current_version=base.version,
                current_etag=base.etag,
            )
        tensors[names[name]] = old, data
    return WeightsBlob.joined(_laid_out(tensors, theirs.metadata))


def _located(data: memoryview, entries: Mapping[str, TensorEntry]) -> Tensors:
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    return {name: (entry, data[entry.begin : entry.end]) for name, entry in ordered}


def _laid_out(tensors: Tensors, metadata: Mapping[str, str]) -> tuple[memoryview, ...]:
    header, _ = make_header([(name, entry.dtype, entry.shape) for name, (entry, _) in tensors.items()], metadata)
    return (memoryview(header), *(data for _, data in tensors.values()))
