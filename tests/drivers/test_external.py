"""Kills of an S3 server and of trainings: the short form of ``python -m
tests.drivers.external``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.external import drive, drive_slowly
from tests.support.effort import effort
from tests.support.stores import S3Server


@pytest.fixture
def server(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.mark.long
def test_external_states_restore_from_the_bucket_alone_after_kills(
    tmp_path: Path, server: S3Server
) -> None:
    rounds = effort(10, 1)

    report = drive(tmp_path, server, rounds, what="both")

    assert report.anomalies == []
    assert report.counts["kills of a training"] == rounds
    assert report.counts["external states loaded from the bucket alone"] > rounds
    assert set(report.fates.values()) == {"on the tier"}


@pytest.mark.long
def test_a_slow_tier_gets_each_durable_state_unless_the_log_names_it(
    tmp_path: Path, server: S3Server
) -> None:
    report = drive_slowly(tmp_path, server, seconds=effort(20, 4))

    assert report.anomalies == []
    assert "on the tier" in report.fates.values()
