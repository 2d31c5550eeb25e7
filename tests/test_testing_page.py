"""docs/testing.md: its files are a folder whose tests pass."""

import re
import subprocess
import sys

import pytest

from tests import commands, page_blocks

PAGE = "docs/testing.md"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_files_of_the_page_pass(tmp_path):
    names = []
    for block in page_blocks.find("python"):
        if block.page == PAGE:
            names.append(re.match(r"# (\w+\.py)\n", block.text)[1])
            (tmp_path / names[-1]).write_text(block.text)
    assert names == [
        *("train.py", "conftest.py", "test_step.py", "job.py", "test_job.py"),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=commands.environ() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout
    # A world per number of replicas, one of which has nothing to average, and a job.
    assert "6 passed, 1 skipped" in result.stdout
