"""Merges a partial upload into a retained version."""

from cormorant_api.errors import ApiError
from cormorant_api.weights.store import StoredModel
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.tensor_file import make_header, parse_header
from cormorant_worker.weights.blob import WeightsBlob


def merge(base: StoredModel, patch: WeightsBlob) -> WeightsBlob:
    """A copy of the base with the patch's tensors and metadata: metadata never belongs to two publishes.

    The layout is the base's, so the same patch over the same base gives the same bytes and digest.

    Raises:
        ApiError: 409, the base lacks such a tensor.
    """
    whole, theirs = memoryview(b"".join(base.buffers)), parse_header(patch.buffer)
    before = parse_header(whole)
    ordered = sorted(before.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    header, ours = make_header([(name, entry.dtype, entry.shape) for name, entry in ordered], theirs.metadata)
    blob = WeightsBlob.joined([header, whole[before.data_start :]])
    kept = {name.removeprefix(f"{base.name}/"): entry for name, entry in ours.tensors.items()}
    for name, new in patch.tensors.get(base.name, {}).items():
        old = kept.get(name)
        if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
            found = "lacks" if old is None else f"has {old.dtype} {list(old.shape)} for"
            raise ApiError(
                ProblemType.BASE_MISMATCH,
                f"version {base.version} {found} {base.name}/{name[:80]}, but the patch has it as {new.dtype} "
                f"{list(new.shape)}: the version belongs to another policy; publish all tensors",
                current_version=base.version,
                current_etag=base.etag,
            )
        begin, source = ours.data_start + old.begin, theirs.data_start + new.begin
        size = old.end - old.begin
        blob.buffer[begin : begin + size] = patch.buffer[source : source + size]
    return blob
