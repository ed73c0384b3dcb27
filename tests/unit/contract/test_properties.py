"""Manifests that nobody wrote by hand: the models and the CRD are of one mind on them."""

from typing import Any

from hypothesis import HealthCheck, given, settings

from cormorant_contract.errors import ManifestError
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job
from manifest_strategies import changed_manifests, manifests
from structural import verdict


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(manifests())
def test_valid_manifest_round_trips_and_fits_the_schema(document: dict[str, Any]) -> None:
    job = parse_job(document)
    again = job.to_document()
    assert CollectorJob.model_validate(again) == job
    assert parse_job(again).to_document() == again
    assert verdict(document) == []
    assert verdict(again) == []


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(changed_manifests())
def test_models_and_schema_agree_on_one_changed_value(document: dict[str, Any]) -> None:
    assert is_accepted(document) == (verdict(document) == [])


def is_accepted(document: dict[str, Any]) -> bool:
    try:
        parse_job(document)
    except ManifestError:
        return False
    return True
