"""Jobs that span hosts; `make two-hosts` runs the whole table, and large buffers."""

import pytest

from tests import two_hosts
from tests.two_hosts_program import WAYS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def _can_be_made():
    if why := two_hosts.why_not():
        pytest.skip(why)


def _texts(outcomes):
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcomes
    return "\n".join(outcome.output for outcome in outcomes)


def test_a_machine_that_cannot_have_two_hosts_says_why(monkeypatch):
    find = two_hosts.why_not.__wrapped__
    monkeypatch.setattr(two_hosts.os, "geteuid", lambda: 1000)
    assert "need root" in find()
    monkeypatch.setattr(two_hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(two_hosts.shutil, "which", lambda tool: None)
    assert "the tool `ip`, which is not installed" in find()


@pytest.mark.multiprocess
@pytest.mark.timeout(300)  # A few seconds, but for a machine that is busy.
@pytest.mark.usefixtures("_can_be_made")
@pytest.mark.parametrize(
    "kind,per_host,coordinator,is_keyed,ways",
    [
        # By a name that is 127.0.1.1 on the first host alone, half of whose processes
        # come to it over the loopback interface.
        ("debian", 2, f"{two_hosts.NAMES[0]}:{two_hosts.PORT}", True, ["auto"]),
        ("names", 1, f"[{two_hosts.ADDRESSES_6[0]}]:{two_hosts.PORT}", False, WAYS),
    ],
)
def test_training_spans_hosts(kind, per_host, coordinator, is_keyed, ways, tmp_path):
    count = ["-n", str(per_host)]
    if is_keyed:
        count += ["--key-file", two_hosts.write_key(tmp_path)]
    with two_hosts.make(kind) as hosts:
        outcomes = hosts.launch(
            [*count, "-m", "tests.two_hosts_program", "quick", *ways],
            coordinator=coordinator,
            timeout_s=280.0,
        )
    text = _texts(outcomes)
    for way in ways:
        assert text.count(f"TRAINED {way}") == 2 * per_host, text
    assert ("has no key" in text) != is_keyed


@pytest.mark.multiprocess
@pytest.mark.timeout(300)  # A few seconds, but for a machine that is busy.
@pytest.mark.usefixtures("_can_be_made")
def test_parameter_servers_span_hosts(tmp_path):
    with two_hosts.make("debian") as hosts:
        commands = two_hosts.serve_commands(1, two_hosts.write_key(tmp_path))
        text = _texts(hosts.run(commands, timeout_s=280.0))
    for index, name in enumerate(two_hosts.NAMES):
        assert f"TRAINED parameter server {index} {name}" in text
