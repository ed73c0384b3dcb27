import uuid

import gymnasium
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cormorant_worker.sinks.dataset import open_dataset
from cormorant_worker.sinks.shards import ShardLimits
from cormorant_worker.sinks.verify import verify


@st.composite
def voyages(draw):
    num_envs, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    lengths = st.lists(st.integers(0, num_rows), min_size=num_envs, max_size=num_envs)
    return {
        "observation": draw(st.sampled_from(["box", "image", "nested", "discrete"])),
        "action": draw(st.sampled_from(["discrete", "box", "nested"])),
        "num_envs": num_envs,
        "num_rows": num_rows,
        "recurrent": draw(st.booleans()),
        "info": draw(st.booleans()),
        "end_odds": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "batches": draw(st.lists(st.one_of(st.none(), lengths), min_size=1, max_size=5)),
        "shard_bytes": draw(st.sampled_from([1, 500, 1 << 20])),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(voyage=voyages())
def test_every_value_of_every_trajectory_comes_back(make_dice, voyage):
    batches, shard_bytes = voyage.pop("batches"), voyage.pop("shard_bytes")
    dice = make_dice(**voyage)
    uri = f"memory://{uuid.uuid4().hex}"
    dataset = open_dataset(uri, dice.description())
    with dataset.writer("cpu-0-0", dice.layout, limits=ShardLimits(size_bytes=shard_bytes)) as writer:
        for lengths in batches:
            writer.append(dice.fill(lengths))

    assert dataset.frames == writer.durable_frames == dice.frames
    dice.assert_stored(dataset.iter_trajectories())
    assert verify(uri).problems == ()


def test_images_are_compressed_and_numbers_are_not(make_dice, stored, tmp_path):
    still = gymnasium.spaces.Box(0, 255, (4, 32, 32), np.uint8)
    dice = make_dice(still, num_rows=20)
    dice._observe = lambda: (np.zeros((4, 32, 32), np.uint8),)
    dataset = stored(dice, parts=("cpu-0-0",), shards=1)
    record = dataset.parts()[0].records[0]
    assert record.size_bytes < record.frames * 4 * 32 * 32 / 10


def test_plain_arrow_reads_a_shard(make_dice, stored, tmp_path):
    import pyarrow as pa

    dice = make_dice("nested")
    dataset = stored(dice, parts=("cpu-0-0",), shards=1)
    table = pa.ipc.open_file(tmp_path / "dataset" / "cpu-0-0" / "frames-000000.arrow").read_all()
    assert table.num_rows == dataset.frames
    assert table["observation.cam.0"].combine_chunks().to_numpy_ndarray().shape == (12, 2, 4, 5)
