"""Strings that a learner publishes with its weights: one request, one version, one file."""

from pathlib import Path

import pytest

from cormorant_client import Client, WeightsError, connect
from cormorant_client.publishing import make_body
from cormorant_contract.tensor_file import parse_header
from cormorant_testing.collecting import make_job
from cormorant_testing.policies import numbered
from cormorant_testing.serving import Served, serve, weights_file

JOB = make_job(num_envs=1, policy="versioned", action="box", collection={"framesPerBatch": 30})


def client_of(served: Served) -> Client:
    return connect(served.server.url, token=served.writer.token, reconnect_s=0)


def pair(client: Client, version: int) -> tuple[float, str | None]:
    """The weights of a version, and the metadata that came with them."""
    found = client.weights(version=version)
    return float(found.numpy()["number"]), found.metadata.get("learner")


def test_metadata_is_of_one_publish_whoever_makes_it_and_outlives_the_head(tmp_path: Path) -> None:
    with serve(JOB, directory=tmp_path) as served, client_of(served) as one, client_of(served) as two:
        first = one.publish({"policy": numbered(1)}, metadata={"learner": "one 1"}).version
        assert two.publish(numbered(2), metadata={"learner": "two 2"}).version == first + 1
        # `one` does not know of it, and asks for the same number.
        assert one.publish(numbered(3), metadata={"learner": "one 3"}).version == first + 2
        assert [pair(two, first + n) for n in range(3)] == [(1, "one 1"), (2, "two 2"), (3, "one 3")]
        assert pair(one, one.rollback(first + 2).version) == (3, "one 3")
        assert pair(one, one.publish(numbered(5)).version) == (5, None)
        last = one.rollback(first + 2).version
    with serve(JOB, directory=tmp_path) as served, client_of(served) as client:
        assert pair(client, last) == (3, "one 3")
        text = "x" * ((1 << 20) - len('{"learner": ""}'))
        assert pair(client, client.publish(numbered(1), metadata={"learner": text}).version) == (1, text)
    with pytest.raises(WeightsError, match="the metadata has 1,048,577 bytes as JSON, the limit is 1,048,576; store"):
        make_body(numbered(1), metadata={"learner": text + "x"})


def test_metadata_that_is_not_strings_is_refused() -> None:
    with pytest.raises(WeightsError, match="must map strings to strings"):
        make_body(numbered(1), metadata={"updates": 3})  # type: ignore[dict-item]  # a learner's mistake
    with pytest.raises(WeightsError, match="cannot be added to a safetensors file; save the file with its metadata"):
        make_body(weights_file(1), metadata={"updates": "3"})
    (piece, *_) = make_body({"a": numbered(1), "b": numbered(2)}, metadata={"updates": "3"}).pieces
    assert parse_header(piece, file_size=len(piece) + 32).metadata == {"updates": "3"}
