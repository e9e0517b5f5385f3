"""What the tests of benchmarks share: clients that cost little to make."""

from __future__ import annotations

from tests.certificates import share_certificates

share_certificates()
