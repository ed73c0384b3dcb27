"""Manifests that nobody wrote by hand: the models and the CRD are of one mind on them."""

from typing import Any

from hypothesis import HealthCheck, given, settings

from cormorant_contract.errors import ManifestError
from cormorant_contract.parsing import parse_job
from manifest_strategies import changed_manifests
from structural import verdict


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(changed_manifests())
def test_models_and_schema_agree_on_one_changed_value(document: dict[str, Any]) -> None:
    complaints = verdict(document)
    try:
        again = parse_job(document).to_document()
    except ManifestError:
        assert complaints
        return
    assert complaints == []
    assert parse_job(again).to_document() == again
    assert verdict(again) == []
