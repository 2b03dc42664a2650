"""``conserve doctor`` on a Ray cluster: none there."""

import subprocess
import sys


def test_where_there_is_no_cluster_it_says_so() -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "conserve_cli.main", "doctor", "--address", "127.0.0.1:1"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "No Ray cluster at 127.0.0.1:1" in refused.stdout
