"""The arguments of the installed TorchRL and Tianshou, against the tables of the migration guides."""

import dataclasses
import inspect

import pytest

from cormorant_testing.guides import names_in


def attribute(path: str) -> object:
    module, _, name = path.partition(":")
    found = pytest.importorskip(module, reason=f"{module} is not installed; `make test-peers` runs this test")
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("guide", "section", "path"),
    [
        ("torchrl", "`RayCollector", "torchrl.collectors.distributed:RayCollector.__init__"),
        ("torchrl", "`sync_sync_collector", "torchrl.trainers.helpers.collectors:sync_sync_collector"),
        ("torchrl", "`sync_sync_collector", "torchrl.trainers.helpers.collectors:sync_async_collector"),
        ("torchrl", "`make_collector", "torchrl.trainers.helpers.collectors:make_collector_onpolicy"),
        ("torchrl", "`make_collector", "torchrl.trainers.helpers.collectors:make_collector_offpolicy"),
        ("torchrl", "`MultiThreadedEnv", "torchrl.envs:MultiThreadedEnv.__init__"),
        ("tianshou", "`Collector", "tianshou.data:Collector.__init__"),
        ("tianshou", "`Collector", "tianshou.data:AsyncCollector.__init__"),
        ("tianshou", "`collect(", "tianshou.data:Collector.collect"),
    ],
)
def test_every_argument_of_the_installed_release_has_its_row(guide: str, section: str, path: str) -> None:
    parameters = inspect.signature(attribute(path)).parameters  # type: ignore[arg-type]
    assert set(parameters) - names_in(f"how-to/migrating-from-{guide}.md", section) - {"self", "kwargs"} == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("guide", "section", "path"),
    [
        ("torchrl", "`make_collector", "torchrl.trainers.helpers.collectors:OffPolicyCollectorConfig"),
        ("tianshou", "Methods", "tianshou.data:CollectStats"),
    ],
)
def test_every_field_of_the_installed_release_has_its_row(guide: str, section: str, path: str) -> None:
    fields = {field.name for field in dataclasses.fields(attribute(path))}  # type: ignore[arg-type]
    assert fields - names_in(f"how-to/migrating-from-{guide}.md", section) == set()
