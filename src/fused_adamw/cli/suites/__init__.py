"""The suites of ``fused-adamw verify``."""

from __future__ import annotations

from fused_adamw.cli.suites import build, cuda, graph, host, oracle, reference

SUITES = {suite.SUITE.name: suite.SUITE for suite in (oracle, reference, host, build, cuda, graph)}
