"""Whatever stands in a file, reading it ends with jobs or with sentences."""

from contextlib import suppress

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cormorant_contract.errors import ManifestError
from cormorant_manifest.reader import parse_jobs
from manifest_cases import VALID

TEXTS = [yaml.safe_dump(document) for document in VALID.values()]
TOKENS = st.sampled_from(
    [*"{}[]:,-?&*!|>'\"%@`#\n\t ", "---", "...", "<<: *a", "&a", "!!set", "!!float x", "0x", "~", "1e999"]
)


@settings(max_examples=200)
@given(st.text(max_size=200) | st.lists(TOKENS, max_size=30).map("".join))
def test_any_text(text: str) -> None:
    with suppress(ManifestError):
        parse_jobs(text, "job.yaml")


@settings(max_examples=200)
@given(st.sampled_from(TEXTS), st.data())
def test_manifest_with_random_edits_is_handled(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    with suppress(ManifestError):
        parse_jobs(text[:start] + data.draw(TOKENS | st.text(max_size=4)) + text[end:], "job.yaml")
